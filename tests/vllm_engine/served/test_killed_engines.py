"""Streams on two replicas of a model with vLLM, of which one is killed under them."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from benchmarks.free_port import free_port
from serve_app.commands.check.compose import VLLM_MODEL
from tests.ray.serve_run import wait_until
from tests.ray.started import started
from tests.vllm_engine.served.test_two_environments import (
    ENDS_S,
    Served,
    entry,
    is_alive,
    save_model,
    title_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.slow]

NUM_TOKENS = 300
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"temperature": 1, "seed": 7},
    "top_p": {"temperature": 0.8, "seed": 8, "top_p": 0.8},
    "top_k and min_p": {"temperature": 1, "seed": 9, "top_k": 40, "min_p": 0.02},
    "repetition": {"temperature": 0, "repetition_penalty": 1.3},
    "penalties": {
        "temperature": 1,
        "seed": 10,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.3,
    },
    "bias": {"temperature": 1, "seed": 11, "logit_bias": {"60": 3, "61": -100}},
    "logprobs": {"temperature": 1, "seed": 12, "logprobs": 2},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("killed")
    model = entry(
        "tiny",
        save_model(folder / "tiny"),
        engine="vllm",
        engine_args={"enforce_eager": True, "kv_cache_memory_bytes": 2**26, "max_num_seqs": 8},
        num_cpus=0.1,
    )
    port = free_port()
    application = {
        "name": "raystream",
        "route_prefix": "/",
        "import_path": "serve_app.app:build",
        "args": {"models": [model], "limits": {"failover_timeout_s": 300, "stall_timeout_s": 300}},
        "deployments": [{"name": "tiny", "num_replicas": 2, **VLLM_MODEL}],
    }
    http_options = {"host": "127.0.0.1", "port": port}
    file = {"http_options": http_options, "applications": [application]}
    (folder / "killed.yaml").write_text(yaml.safe_dump(file))
    command = [str(Path(sys.executable).with_name("raystream")), "serve", "killed.yaml"]
    url = f"http://127.0.0.1:{port}"
    with started(command, folder, dict(os.environ), url) as (pid, _):
        yield Served(url, pid)


def replicas(served: Served) -> list[psutil.Process]:
    """Return the replicas that have an engine."""
    processes = psutil.Process(served.pid).children(recursive=True)
    found = [each for each in processes if "ServeReplica:raystream:tiny" in title_of(each)]
    return [each for each in found if engine_of(each) is not None]


def engine_of(replica: psutil.Process) -> psutil.Process | None:
    return next((each for each in replica.children() if "EngineCore" in title_of(each)), None)


async def texts(served: Served, kill: Callable[[], None] | None = None) -> dict[str, str]:
    """Return the events of all kinds of streams without their ids; kill once all have begun."""
    begun = dict.fromkeys(KINDS, 0)

    async def read(client: httpx.AsyncClient, name: str) -> str:
        body = {
            "model": "tiny",
            "prompt": "def f(x):",
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            **KINDS[name],
        }
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = httpx.Response(200, content=line[6:]).json()
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
                    begun[name] += 1
        assert line == "" or line == "data: [DONE]"
        return text

    async with httpx.AsyncClient(base_url=served.url, timeout=300) as client:
        tasks = {name: asyncio.ensure_future(read(client, name)) for name in KINDS}
        if kill is not None:
            async with asyncio.timeout(60):
                while not all(begun.values()):  # noqa: ASYNC110 - streams tell of nothing else
                    await asyncio.sleep(0.002)
            kill()
        return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))


def serving(served: Served) -> list[psutil.Process]:
    """Return the replicas that live and are ready."""
    (model,) = httpx.get(f"{served.url}/v1/devices", timeout=30).json()["data"]
    ready = {each["process_id"] for each in model["replicas"]}
    return [each for each in replicas(served) if each.pid in ready]


@pytest.mark.parametrize("of_engine", [False, True], ids=["the replica", "its engine"])
async def test_streams_go_on_byte_for_byte_after_a_kill(served: Served, of_engine: bool) -> None:
    wait_until(lambda: len(serving(served)) == 2, 240)
    expected = await texts(served)
    replica, _ = serving(served)
    family = replica.children(recursive=True)
    killed = engine_of(replica) if of_engine else replica
    assert killed is not None
    found = await texts(served, killed.kill)
    assert {name: found[name] for name in KINDS if found[name] != expected[name]} == {}
    wait_until(lambda: not any(map(is_alive, family)), ENDS_S + 10 * of_engine)
