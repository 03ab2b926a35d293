"""One server: raystream's own engine and vLLM in two environments, and two poolers on vLLM.

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
import yaml

from benchmarks.free_port import free_port
from serve_app.commands.check.compose import VLLM_MODEL
from serve_app.config import AppConfig
from serve_app.vllm_environment import DEFAULT_FOLDER, problems
from tests.deployments.tiny_folder import save_text_model
from tests.engine.tiny_models import wide_qwen2
from tests.offenders import every
from tests.ray.serve_run import ROOT, wait_until
from tests.ray.started import started
from tests.serve_app.local_server import local_server

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.slow]

ON_VLLM = ("first", "second", "classifier", "embedder")
TEXTS = ["def join(path): return path", "Call me Ishmael.", "a word " * 40]
TOLERANCE = 1e-4
ENDS_S = 5
"""How long a killed replica's processes may last."""


@dataclass(frozen=True)
class Served:
    """A server of three models with the same weights (own, first, second), and of two poolers."""

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


def entry(id_: str, source: Path, **keys: Any) -> dict[str, Any]:
    return {"id": id_, "source": str(source), "num_threads": 1, "dtype": "float32", **keys}


def poolers(**keys: Any) -> list[dict[str, Any]]:
    return [
        entry("classifier", ROOT / "models/pydoc-detector", task="classify", num_cpus=0.1, **keys),
        entry("embedder", ROOT / "models/pydoc-search", task="embed", num_cpus=0.1, **keys),
    ]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("two")
    source = save_text_model(folder / "tiny", wide_qwen2())
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
        *poolers(engine="vllm", engine_args={"enforce_eager": True}),
    ]
    port = free_port()
    application = {
        "name": "raystream",
        "route_prefix": "/",
        "import_path": "serve_app.app:build",
        "args": {"models": models},
        "deployments": [{"name": name, **VLLM_MODEL} for name in ON_VLLM],
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


ASKED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/classify", {"model": "classifier", "input": TEXTS}, "scores"),
    ("/v1/embeddings", {"model": "embedder", "input": TEXTS}, "embedding"),
]


def numbers(told: list[Any]) -> list[float]:
    """Return the numbers of a vector, or of the scores of all labels in the labels' order."""
    if isinstance(told[0], dict):
        return [each["score"] for each in sorted(told, key=lambda each: str(each["label"]))]
    return told


def test_texts_are_classified_and_embedded_as_by_raystream_s_own_engine(served: Served) -> None:
    config = AppConfig.model_validate({"models": poolers()})
    with local_server(config) as local, local.client() as own:
        for case in every(ASKED):
            with case as (path, body, field):
                expected = own.post(path, json=body).raise_for_status().json()
                answer = httpx.post(f"{served.url}{path}", json=body, timeout=60)
                found = answer.raise_for_status().json()
                assert found["usage"] == expected["usage"]
                for mine, theirs in zip(found["data"], expected["data"], strict=True):
                    assert numbers(mine[field]) == pytest.approx(
                        numbers(theirs[field]), abs=TOLERANCE
                    )


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
