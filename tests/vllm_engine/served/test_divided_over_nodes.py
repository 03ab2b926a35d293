"""A model on vLLM whose two halves are on two nodes of Ray, each with one GPU.

Both nodes are on this machine, and Ray only counts the GPUs: the halves compute on the CPU
(`ray_on_cpu`). All else is what runs on GPUs: the placement group, Ray's workers, their end.
"""

import asyncio
import os
import shlex
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file

from serve_app.commands.check.compose import VLLM_MODEL
from serve_app.vllm_environment import DEFAULT_FOLDER
from tests.engines import SMALL_VLLM, chat_model
from tests.faults.served.answer import assert_equal, opened, read
from tests.faults.served.conftest import config
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.nodes import Cluster
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import Replicas, is_alive, kill, reached
from tests.measured import Record

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.slow]

MODEL, WHOLE = "pydoc-chat", "whole"
WORKER = "RayWorkerProc"
"""vLLM's class of a worker, in the title that Ray gives its process."""

NUM_TOKENS = 48
BODIES = [
    about("os.path.join", NUM_TOKENS),
    about("os.stat", NUM_TOKENS, **SEEDED),
    about("re.sub", NUM_TOKENS, **SEEDED, frequency_penalty=0.6, logprobs=True),
]
AT = 7
"""Tokens of each stream that are delivered before something is harmed."""

ENDS_S = 15
"""How long processes of a killed replica may last, on either node."""

NOTICED_S = 90
"""How long it may take until a replica has ended of which a worker has died or stands still."""


def environment_of(folder: Path) -> Path:
    """Return an environment of vLLM that is the tests' own, and takes Ray's GPUs for devices."""
    changed = Path(__file__).with_name("ray_on_cpu")
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").symlink_to(DEFAULT_FOLDER / "lib")
    python = folder / "bin/python"
    own = shlex.quote(str(DEFAULT_FOLDER / "bin/python"))
    path = f"{shlex.quote(str(changed))}${{PYTHONPATH:+:$PYTHONPATH}}"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {own} "$@"\n')
    python.chmod(0o755)
    return folder


def document(folder: Path, http_port: int) -> dict[str, Any]:
    """Return a file with the chat model twice: divided by vLLM, and whole on our own engine."""
    found = config()
    found["http_options"]["port"] = http_port
    application = found["applications"][0]
    application["args"]["auth"]["allow_unauthenticated_ray"] = True
    application["args"]["limits"] |= {"failover_timeout_s": 300, "stall_timeout_s": 300}
    (chat,) = application["args"]["models"]
    source = str(chat_model("vllm", folder / "chat"))
    chat |= {"source": source, "dtype": "float32", "num_cpus": 0.1, "num_threads": 1}
    divided = {
        **chat,
        **SMALL_VLLM,
        "engine_python": str(environment_of(folder / "vllm")),
        "engine_args": {
            **SMALL_VLLM["engine_args"],
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "ray",
        },
    }
    application["args"]["models"] = [divided, {**chat, "id": WHOLE, "num_gpus": 0}]
    ingress, section = application["deployments"]
    assert section["name"] == MODEL
    section |= {**VLLM_MODEL, "num_replicas": 1}
    application["deployments"] = [ingress, section, {"name": WHOLE, "num_replicas": 1}]
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("divided")
    Replicas.watched_in(folder)
    cluster = Cluster(folder, num_gpus=1)
    try:
        cluster.add_worker(num_gpus=1)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def deployed(cluster: Cluster) -> Deployed:
    url = f"http://127.0.0.1:{cluster.dashboard_port}"
    deployed = Deployed(url, document(cluster.folder, cluster.head.http_port))

    async def deploy() -> None:
        await deployed.reachable(num_nodes=2)
        await deployed.apply()
        await deployed.settled()

    asyncio.run(deploy())
    return deployed


@pytest.fixture
async def client(cluster: Cluster, deployed: Deployed) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{cluster.head.http_port}"
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        yield client


@pytest.fixture
async def replica(cluster: Cluster, deployed: Deployed) -> int:
    """Wait until the divided model's replica runs; return its process."""
    await deployed.settled()
    return replica_of(cluster)


def replica_of(cluster: Cluster) -> int:
    (found,) = titled(cluster, f"ray::ServeReplica:raystream:{MODEL}")
    return found


def titled(cluster: Cluster, words: str) -> list[int]:
    """Return the living processes of both nodes whose titles have these words."""
    nodes = (cluster.head, *cluster.workers)
    return [each for node in nodes for each in node.process_ids() if words in title_of(each)]


def title_of(process: int) -> str:
    try:
        return " ".join(psutil.Process(process).cmdline()) if is_alive(process) else ""
    except psutil.Error:
        return ""


async def test_a_model_on_two_nodes_says_what_it_says_whole(
    cluster: Cluster, client: httpx.AsyncClient, replica: int
) -> None:
    workers = set(titled(cluster, WORKER))
    for node in (cluster.head, *cluster.workers):
        assert len(node.process_ids() & workers) == 1
    divided = await read(client, BODIES[0])
    whole = await read(client, {**BODIES[0], "model": WHOLE})
    assert divided.choices[0].text == whole.choices[0].text
    assert divided.heads.isdisjoint(whole.heads)


async def test_the_gpus_are_told_by_their_number(client: httpx.AsyncClient, replica: int) -> None:
    models = (await client.get("/v1/devices")).raise_for_status().json()["data"]
    (divided,) = (each for each in models if each["id"] == MODEL)
    (told,) = divided["replicas"]
    assert told["device"] == "2 GPUs that Ray has found"
    assert told["memory"]["use"]["device_total_bytes"] is None


Harm = Callable[[int, list[int]], None]


def kill_worker(replica: int, workers: list[int]) -> None:
    kill(workers[-1])


def kill_replica(replica: int, workers: list[int]) -> None:
    kill(replica)


def stop_worker(replica: int, workers: list[int]) -> None:
    os.kill(workers[0], signal.SIGSTOP)


@pytest.mark.parametrize(
    "harm",
    [
        kill_worker,
        pytest.param(kill_replica, marks=pytest.mark.soak),
        pytest.param(stop_worker, marks=pytest.mark.soak),
    ],
)
async def test_streams_go_on_whatever_happens_to_a_part_and_nothing_of_it_is_left(
    cluster: Cluster, client: httpx.AsyncClient, replica: int, record: Record, harm: Harm
) -> None:
    replicas = Replicas(cluster.folder)
    expected = [await read(client, body) for body in BODIES]
    name = f"stop-at-{AT}-{uuid4().hex}"
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(opened(client, body, request_id=f"{name}-{i}"))
            for i, body in enumerate(BODIES)
        ]
        await reached(lambda: replicas.num_stopped(name) == len(BODIES))
        family = family_of(cluster, replica)
        harm(replica, titled(cluster, WORKER))
        within_s = ENDS_S if harm is kill_replica else NOTICED_S
        gone_s = await reached(lambda: not any(map(is_alive, family)), within_s)
        record("until all its processes had ended, s", round(gone_s, 2))
        answers = await asyncio.gather(*(each.read_to_end() for each in streams))
    assert_equal(answers, expected)
    assert all(answer.lost_at == [AT] for answer in answers)


async def test_a_killed_replica_leaves_no_process_on_any_node(
    cluster: Cluster, replica: int, record: Record
) -> None:
    family = family_of(cluster, replica)
    kill(replica)
    gone_s = await reached(lambda: not any(map(is_alive, family)), ENDS_S)
    record("until all its processes had ended, s", round(gone_s, 2))


@pytest.mark.soak
async def test_a_worker_that_can_not_load_says_why_in_one_line(deployed: Deployed) -> None:
    (divided, _) = deployed.models
    weights = Path(divided["source"]) / "model.safetensors"
    whole = load_file(weights)
    cut = min(name for name in whole if name.endswith("q_proj.weight"))
    short = {**whole, cut: whole[cut][:8].contiguous()}
    try:
        save_file(short, weights, metadata={"format": "pt"})
        divided["max_num_seqs"] = 2  # so that Serve starts another replica
        await deployed.apply()
        told = await message_of(deployed)
    finally:
        save_file(whole, weights, metadata={"format": "pt"})
        deployed.restore()
        await deployed.apply()
    assert "vLLM can't start: " in told
    (line,) = (each for each in told.splitlines() if "vLLM can't start: " in each)
    assert "IndexError: start out of range" in line  # of the second half, which has no rows


async def message_of(deployed: Deployed) -> str:
    """Return what Serve says of the divided model, once it says why a replica did not start."""
    async with asyncio.timeout(NOTICED_S * 2):
        while True:
            details = await deployed.details()
            told = str(details["deployments"].get(MODEL, {}).get("message", ""))
            if "can't start" in told:
                return told
            await asyncio.sleep(0.2)


def family_of(cluster: Cluster, replica: int) -> list[int]:
    """Return a replica, what it has started, and the two workers."""
    below = [each.pid for each in psutil.Process(replica).children(recursive=True)]
    workers = titled(cluster, WORKER)
    assert below
    assert len(workers) == 2
    return [replica, *below, *workers]
