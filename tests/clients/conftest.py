import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from benchmarks.free_port import free_port
from tests.clients.questions import MODEL, NARROW
from tests.clients.tiny_poolers import entries
from tests.ray.serve_run import (
    READY_DEADLINE_S,
    ROOT,
    SERVE_RUN,
    Server,
    haproxy_environment,
    serving,
    wait_until,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.ray)


def config(folder: Path) -> dict[str, Any]:
    """Return the shipped configuration with a second, narrow model, and a window into both.

    An embedding model and a cross-encoder, both tiny and random, are made in the folder.
    """
    document: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    document["http_options"]["port"] = free_port()
    application = document["applications"][0]
    application["import_path"] = "tests.clients.served:build"
    wide = application["args"]["models"][0]
    assert wide["id"] == MODEL
    # 2048 is the model's length: the streams that fill it must outlast the test's next call.
    narrow = {
        **wide,
        "id": NARROW,
        "num_cpus": 0.2,
        "max_num_seqs": 1,
        "max_queued_requests": 1,
        "max_model_len": 2048,
    }
    application["args"]["models"] += [narrow, *entries(folder)]
    window = {
        "name": "window",
        "route_prefix": "/window",
        "import_path": "tests.clients.served:window",
    }
    document["applications"].append(window)
    return document


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server as `make serve` does, and stop it after the last test of this package."""
    folder = tmp_path_factory.mktemp("clients")
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config(folder)))
    environment = {**os.environ, "HOME": str(folder)} | haproxy_environment()
    with serving(Server(path, folder / "serve.log", environment, SERVE_RUN)) as started:
        # The window is another application, which may start later.
        window = httpx.URL(f"{started.url}/window/num_steps", params={"model": NARROW})
        wait_until(lambda: httpx.get(window, timeout=30).is_success, READY_DEADLINE_S)
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0
    ) as client:
        yield client


class Window:
    """Observes a model's replica from outside."""

    def __init__(self, url: str) -> None:
        self.url = url

    def wait_until_running(self, model: str, num_running: int) -> None:
        self._ask("wait_until_running", model=model, num_running=str(num_running))

    def num_steps(self, model: str) -> int:
        return int(self._ask("num_steps", model=model))

    def process_id(self, model: str) -> int:
        return int(self._ask("process_id", model=model))

    def _ask(self, method: str, **query: str) -> float:
        answer = httpx.get(f"{self.url}/{method}", params=query, timeout=30)
        return float(answer.raise_for_status().json())


@pytest.fixture
def window(server: Server) -> Window:
    return Window(f"{server.url}/window")
