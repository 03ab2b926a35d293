import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import ray
from playwright.async_api import Browser
from ray import serve
from ray.serve.config import HTTPOptions

from benchmarks.free_port import free_port
from tests.browser import launched
from tests.deployments.tiny_folder import save_text_model
from tests.ray.serve_run import Server, haproxy_environment, serving, shipped_config
from tests.ray.twins import Twins, serve_twins
from tests.recording_proxy import RecordingProxy, recording_proxy

NUM_CPUS = 4
NUM_GPUS = 2

SHIPPED_SERVER = (
    "test_open_sockets",
    "test_dashboard",
    "test_examples",
    "test_front_door",
    "test_page",
    "test_only_replica",
    "test_serve_run",
)
"""Modules that share the shipped server, in this order; the last one stops it.

They come first, since the dashboard reads logs only by the first Ray on a machine. The sockets are
looked at before the dashboard: once its Serve tab has been opened, it listens on one more port.
"""

RAY_OF_THIS_PROCESS = (
    "test_access",
    "test_admission",
    "test_streaming",
    "test_pooled_calls",
    "test_gpu_share",
    "test_model_files",
    "test_prometheus",
)
"""Modules that share a Ray in pytest's own process. They come last: it stays until the end."""

# Ray reports its usage by default.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Serve kills a proxy that is not up after 5 s; on a busy machine a process takes longer to start.
os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"


def is_plain(item: pytest.Item) -> bool:
    """Whether a test's shipped server runs without HAProxy."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("shipped_server") == "plain"


def turn(item: pytest.Item) -> tuple[int, bool, int]:
    """Return when a test runs: modules that start a server of their own run in the middle."""
    name = item.path.stem
    if name in SHIPPED_SERVER:
        return 0, is_plain(item), SHIPPED_SERVER.index(name)
    if name in RAY_OF_THIS_PROCESS:
        return 2, False, RAY_OF_THIS_PROCESS.index(name)
    return 1, False, 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    places = [i for i, item in enumerate(items) if item.path.is_relative_to(here)]
    ours = sorted((items[place] for place in places), key=turn)
    for place, item in zip(places, ours, strict=True):
        items[place] = item
        item.add_marker(pytest.mark.ray)
        if is_plain(item):
            item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="package")
def base_url() -> Iterator[str]:
    """Start a local Ray with two pretended GPUs, and Serve's proxy."""
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        num_gpus=NUM_GPUS,
        include_dashboard=False,
        log_to_driver=False,
        # Ray passes metrics on every ten seconds by default.
        _system_config={"metrics_report_interval_ms": 1000},
    )
    port = free_port()
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()  # type: ignore[no-untyped-call] # Ray leaves it untyped
    ray.shutdown()


@pytest.fixture(scope="package")
def twins(base_url: str, tiny_folder: Path) -> Twins:
    """Serve two replicas of a model behind two ingresses."""
    return serve_twins(base_url, tiny_folder)


@pytest.fixture(scope="package")
def proxy() -> Iterator[RecordingProxy]:
    """Run the proxy that the shipped server's environment names."""
    with recording_proxy() as proxy:
        yield proxy


@pytest.fixture(scope="package", params=["plain", "haproxy"])
def shipped_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, proxy: RecordingProxy
) -> Iterator[Server]:
    """Serve the shipped file as `make serve` does; without HAProxy only in the soak.

    A start takes half a minute, so several modules share the server. Modules lie beside the file
    that are named like ours and like others that are imported: a process that takes one ends.
    Nothing can be written to the user's home, as in a container that runs as a number, and the
    environment is that of a network where others are reached through a proxy only.
    """
    folder = tmp_path_factory.mktemp("shipped")
    for name in ("deployments/__init__", "ray/__init__", "serve_app", "yaml", "queue", "torch"):
        foreign = folder / f"{name}.py"
        foreign.parent.mkdir(exist_ok=True)
        foreign.write_text("raise SystemExit(f'{__file__} was imported')")
    environment = {**os.environ, **proxy.variables, "HOME": "/dev/null"} | haproxy_environment()
    environment["RAY_SERVE_ENABLE_HA_PROXY"] = str(int(request.param == "haproxy"))
    with serving(Server(shipped_config(folder), folder / "serve.log", environment)) as server:
        yield server


@pytest.fixture
def server(shipped_server: Server) -> Server:
    """Return the shipped server, where a module has no other."""
    return shipped_server


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with launched() as browser:
        yield browser


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny random model."""
    return save_text_model(tmp_path_factory.mktemp("qwen2"))
