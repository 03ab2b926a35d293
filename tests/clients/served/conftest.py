from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from benchmarks.free_port import free_port
from tests.changing_server import ChangingServer
from tests.clients.questions import NARROW
from tests.clients.served_models import shipped_with_narrow
from tests.ray.serve_run import Server

UNASKED = ("pydoc-detector", "pydoc-search")
"""Models of the shipped file that are only listed; the start of a replica takes ten seconds."""


def config() -> dict[str, Any]:
    """Return the shipped configuration with a second, narrow model, and a window into both."""
    document = shipped_with_narrow()
    document["http_options"]["port"] = free_port()
    document["applications"][0]["import_path"] = "tests.clients.served.application:build"
    window = {
        "name": "window",
        "route_prefix": "/window",
        "import_path": "tests.clients.served.application:window",
    }
    document["applications"].append(window)
    return document


@pytest.fixture(scope="package")
def server(changing_server: ChangingServer) -> Server:
    """Serve these tests' file as `make serve` does; the models that no test asks sleep."""
    document = config()
    for section in document["applications"][0]["deployments"]:
        if section["name"] in UNASKED:
            section["autoscaling_config"]["min_replicas"] = 0
    return changing_server.serve(document)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0
    ) as client:
        yield client


class Window:
    """Observes and holds the narrow model's replica from outside."""

    def __init__(self, url: str) -> None:
        self.url = url

    def hold(self) -> None:
        self._ask("hold")

    def let_go(self) -> None:
        self._ask("let_go")

    def wait_until_admitted(self, num_requests: int) -> None:
        self._ask("wait_until_admitted", num_requests=str(num_requests))

    def wait_until_running(self, num_running: int) -> None:
        self._ask("wait_until_running", num_running=str(num_running))

    def num_steps(self) -> int:
        return int(self._ask("num_steps"))

    def _ask(self, method: str, **query: str) -> Any:
        query["model"] = NARROW
        answer = httpx.get(f"{self.url}/{method}", params=query, timeout=30)
        return answer.raise_for_status().json()


@pytest.fixture
def window(server: Server) -> Iterator[Window]:
    """Return the window; afterwards the narrow model has nothing to do."""
    window = Window(f"{server.url}/window")
    yield window
    window.let_go()
    window.wait_until_admitted(0)
    window.wait_until_running(0)


@pytest.fixture
def held(window: Window) -> Window:
    """Hold the narrow model: its answers begin, and don't end before the test lets it go."""
    window.hold()
    return window
