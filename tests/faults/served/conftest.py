import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from benchmarks.free_port import free_port
from tests.changing_server import ChangingServer
from tests.faults.served.fragile_server import client_of
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import Replicas, reached
from tests.ray.serve_run import (
    ROOT,
    Server,
)

MODEL_SECTION = "pydoc-chat"
NUM_REPLICAS = 2
MAX_NUM_SEQS = 16
NUM_QUEUED = 8


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.slow)


def config() -> dict[str, Any]:
    """Return the shipped configuration with two small, fragile replicas of the chat model."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    document["http_options"]["port"] = free_port()
    application = document["applications"][0]
    application["import_path"] = "tests.faults.served.build:build"
    (chat,) = (each for each in application["args"]["models"] if each["id"] == "pydoc-chat")
    chat |= {"num_cpus": 0.4, "max_num_seqs": MAX_NUM_SEQS, "max_queued_requests": NUM_QUEUED}
    application["args"]["models"] = [chat]
    ingress, replicas = application["deployments"][:2]
    assert (ingress["name"], replicas["name"]) == ("Ingress", "pydoc-chat")
    for section, num_replicas in ((ingress, 1), (replicas, NUM_REPLICAS)):
        del section["autoscaling_config"]
        section["num_replicas"] = num_replicas
    replicas["graceful_shutdown_timeout_s"] = 5  # after which Serve kills a replica that hangs
    application["deployments"] = [ingress, replicas]
    return document


@pytest.fixture(scope="package")
def server(changing_server: ChangingServer) -> Server:
    """Serve these tests' file."""
    return changing_server.serve(config())


@pytest.fixture(scope="package")
def folder(changing_server: ChangingServer) -> Path:
    return changing_server.folder


@pytest.fixture
async def deployed(changing_server: ChangingServer, server: Server) -> AsyncIterator[Deployed]:
    """Return the server's configuration, which a test may change; restore it afterwards."""
    async with changing_server.changeable() as deployed:
        yield deployed


@pytest.fixture
async def replicas(changing_server: ChangingServer, server: Server) -> AsyncIterator[Replicas]:
    """Wait until both replicas live and have nothing to do; check afterwards what they left."""
    replicas = Replicas(changing_server.folder)
    await asyncio.to_thread(changing_server.settle)
    await replicas.complete(NUM_REPLICAS)
    await reached(lambda: replicas.are_idle)
    yield replicas
    await reached(lambda: replicas.are_idle)
    assert replicas.broken == []


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(server) as client:
        yield client


@dataclass(frozen=True)
class Memory:
    """The memory of a server's processes."""

    server: Server

    def of_the_ingress(self) -> int:
        """Return the resident bytes of the ingress."""
        ingresses = self.ingresses()
        assert ingresses
        return sum(psutil.Process(each).memory_info().rss for each in ingresses)

    def ingresses(self) -> list[int]:
        """Return the processes of the ingresses."""
        title = "ray::ServeReplica:raystream:Ingress"
        return [process.pid for process in self.server.processes(title)]


@pytest.fixture
def memory(server: Server) -> Memory:
    return Memory(server)


@pytest.fixture
async def two_ingresses(deployed: Deployed, memory: Memory) -> list[int]:
    """Give the server a second ingress, and return the processes of both."""
    deployed.section("Ingress")["num_replicas"] = 2
    await deployed.apply()
    await deployed.settled()
    return memory.ingresses()
