"""One server, three models: raystream's own engine, and vLLM in two environments.

Both of vLLM's are the same one here, by two names, so that CI installs vLLM once.
"""

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.free_port import free_port
from serve_app.commands.check.compose import VLLM_MODEL
from serve_app.vllm_environment import DEFAULT_FOLDER, problems
from tests.deployments.tiny_folder import save_text_model
from tests.engine.tiny_models import SHAPE
from tests.ray.serve_run import wait_until
from tests.ray.started import started

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.slow]

ENDS_S = 5
"""How long a killed replica's processes may last."""


@dataclass(frozen=True)
class Served:
    """A server of three models with the same weights: own, first, second."""

    url: str
    pid: int

    def text(self, model: str) -> str:
        body = {"model": model, "prompt": "def f(x):", "max_tokens": 16, "temperature": 0}
        found = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        assert found.status_code == 200, found.text
        return str(found.json()["choices"][0]["text"])

    def replica(self, model: str) -> psutil.Process:
        title = f"ray::ServeReplica:raystream:{model}"
        processes = psutil.Process(self.pid).children(recursive=True)
        (found,) = (each for each in processes if title_of(each).startswith(title))
        return found


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def save_model(folder: Path) -> Path:
    """Save a tiny model with heads of 32 values, which vLLM's kernels need."""
    torch.manual_seed(1)
    heads = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(**{**SHAPE, **heads, "max_position_embeddings": 512})
    return save_text_model(folder, Qwen2ForCausalLM(config))


def entry(id_: str, source: Path, **keys: Any) -> dict[str, Any]:
    return {"id": id_, "source": str(source), "num_threads": 1, "dtype": "float32", **keys}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("two")
    source = save_model(folder / "tiny")
    (folder / "envs").mkdir()
    (folder / "envs/second").symlink_to(DEFAULT_FOLDER)
    vllm = {
        "engine": "vllm",
        "engine_args": {"enforce_eager": True, "kv_cache_memory_bytes": 2**26, "max_num_seqs": 8},
    }
    models = [
        entry("own", source),
        entry("first", source, **vllm),
        entry("second", source, **vllm, engine_python="envs/second"),
    ]
    port = free_port()
    application = {
        "name": "raystream",
        "route_prefix": "/",
        "import_path": "serve_app.app:build",
        "args": {"models": models},
        "deployments": [{"name": name, **VLLM_MODEL} for name in ("first", "second")],
    }
    http = {"host": "127.0.0.1", "port": port}
    file = {"http_options": http, "applications": [application]}
    (folder / "two.yaml").write_text(yaml.safe_dump(file))
    command = [str(Path(sys.executable).with_name("raystream")), "serve", "two.yaml"]
    url = f"http://127.0.0.1:{port}"
    with started(command, folder, dict(os.environ), url) as (pid, _):
        yield Served(url, pid)


def test_the_environment_has_all_that_replicas_need() -> None:
    assert list(problems(DEFAULT_FOLDER)) == []


def test_models_of_three_environments_give_the_same_text(served: Served) -> None:
    texts = {model: served.text(model) for model in ("own", "first", "second")}
    assert len(set(texts.values())) == 1, texts


def test_a_killed_replica_leaves_no_process_and_the_next_one_answers(served: Served) -> None:
    expected = served.text("first")
    replica = served.replica("first")
    engine = replica.children(recursive=True)
    assert engine
    replica.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, engine)), ENDS_S)
    assert served.text("first") == expected


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
