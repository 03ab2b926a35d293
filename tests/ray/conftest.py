import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import serve
from ray.serve.config import HTTPOptions

from benchmarks.free_port import free_port
from tests.deployments.tiny_folder import save_text_model

NUM_CPUS = 4

# Ray reports its usage unless it is told not to.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """Start a Ray of our own with one GPU that is not there, and Serve's proxy."""
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


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny random model."""
    return save_text_model(tmp_path_factory.mktemp("qwen2"))
