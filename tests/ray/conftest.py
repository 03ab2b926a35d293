import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import serve
from ray.serve.config import HTTPOptions

from benchmarks.free_port import free_port
from tests.deployments.tiny_folder import save_text_model
from tests.ray.serve_run import (
    Server,
    haproxy_environment,
    serving,
    shipped_config,
)

NUM_CPUS = 4

IN_ONE_MODE = ("test_examples", "test_front_door", "test_only_replica", "test_page")
"""Modules whose long tests run with HAProxy, as `make serve` does; without it only in the soak."""

# Ray reports its usage by default.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Serve kills a proxy that is not up after 5 s; on a busy machine a process takes longer to start.
os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.ray)
            if item.path.stem in IN_ONE_MODE and "[plain" in item.name:
                item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="package")
def base_url() -> Iterator[str]:
    """Start a local Ray with one pretended GPU, and Serve's proxy."""
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        num_gpus=1,
        include_dashboard=False,
        log_to_driver=False,
    )
    port = free_port()
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()  # type: ignore[no-untyped-call] # Ray leaves it untyped
    ray.shutdown()


@pytest.fixture(scope="package", params=["plain", "haproxy"])
def shipped_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Serve the shipped file as `make serve` does, in both of Serve's modes.

    A start takes a minute, so several modules share the server. `test_serve_run` stops it, so no
    module after that one may use it.
    """
    folder = tmp_path_factory.mktemp("shipped")
    environment = {**os.environ, "HOME": str(folder)} | haproxy_environment()
    environment["RAY_SERVE_ENABLE_HA_PROXY"] = str(int(request.param == "haproxy"))
    with serving(Server(shipped_config(folder), folder / "serve.log", environment)) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny random model."""
    return save_text_model(tmp_path_factory.mktemp("qwen2"))
