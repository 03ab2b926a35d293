import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import yaml

from benchmarks.free_port import free_port
from tests.changing_server import ChangingServer
from tests.faults.served.crowd import Pressed, pressed
from tests.faults.served.fragile_server import client_of
from tests.faults.served.ingresses import Ingresses
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import Replicas, reached
from tests.faults.served.scaled_down import ScaledDown, scaled_to_one
from tests.faults.served.sizes import MAX_NUM_SEQS, NUM_QUEUED, NUM_REPLICAS
from tests.faults.served.two_deaths import TwoDeaths, two_deaths
from tests.otlp_receiver import Receiver, receiving
from tests.ray.serve_run import ROOT, Server

CROWD_S = 6
T = TypeVar("T")


def config() -> dict[str, Any]:
    """Return the shipped configuration with two small, fragile replicas of the chat model."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    document["http_options"]["port"] = free_port()
    application = document["applications"][0]
    application["import_path"] = "tests.faults.served.build:build"
    (chat,) = (each for each in application["args"]["models"] if each["id"] == "pydoc-chat")
    chat |= {"num_cpus": 0.4, "max_num_seqs": MAX_NUM_SEQS, "max_queued_requests": NUM_QUEUED}
    application["args"]["models"] = [chat]
    # Slow readers wait until replicas have started, which takes a minute on a busy machine.
    application["args"]["limits"]["slow_reader_timeout_s"] = 120
    ingress, replicas = application["deployments"][:2]
    assert (ingress["name"], replicas["name"]) == ("Ingress", "pydoc-chat")
    for section, num_replicas in ((ingress, 1), (replicas, NUM_REPLICAS)):
        del section["autoscaling_config"]
        section["num_replicas"] = num_replicas
    replicas["graceful_shutdown_timeout_s"] = 5  # after which Serve kills a replica that hangs
    application["deployments"] = [ingress, replicas]
    return document


@pytest.fixture(scope="package")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="package")
def server(changing_server: ChangingServer, receiver: Receiver) -> Server:
    """Serve these tests' file, with a collector of traces."""
    document = config()
    document["applications"][0]["args"]["tracing"]["otlp_endpoint"] = receiver.url
    return changing_server.serve(document)


@pytest.fixture(scope="package")
def folder(changing_server: ChangingServer) -> Path:
    return changing_server.folder


@pytest.fixture
async def deployed(changing_server: ChangingServer, server: Server) -> AsyncIterator[Deployed]:
    """Return the server's configuration, which a test may change; the next one gets the first."""
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


@pytest.fixture
def ingresses(server: Server) -> Ingresses:
    return Ingresses(server)


@pytest.fixture
async def two_ingresses(deployed: Deployed, ingresses: Ingresses) -> list[int]:
    """Give the server a second ingress, and return the processes of both."""
    deployed.section("Ingress")["num_replicas"] = 2
    await deployed.apply()
    await deployed.settled()
    return ingresses.processes()


@pytest.fixture(scope="package")
def deaths(changing_server: ChangingServer, server: Server) -> TwoDeaths:
    """Kill both replicas under a mixed load, once for all tests that read what that left."""
    return run(two_deaths(changing_server))


@pytest.fixture(scope="package")
def crowd(changing_server: ChangingServer, server: Server) -> Pressed:
    """Let ten times as many clients ask as the replicas admit, once for all tests that read it."""
    return run(pressed(changing_server, CROWD_S))


@pytest.fixture(scope="package")
def scaled_down(changing_server: ChangingServer, server: Server) -> ScaledDown:
    """Take all replicas but one away, once for all tests that read what that left."""
    return run(scaled_to_one(changing_server))


def run(situation: Coroutine[Any, Any, T]) -> T:
    """Run what belongs to no test's own loop."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(situation)
