"""A server whose chat model has up to three replicas and the shipped policy, with short delays."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import yaml

from tests.changing_server import ChangingServer
from tests.faults.served.conftest import config
from tests.faults.served.fragile_server import client_of
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import Replicas
from tests.faults.served.sizes import MODEL_SECTION
from tests.ray.serve_run import ROOT, Server

NUM_QUEUED = 64
MAX_NUM_REPLICAS = 3
DOWNSCALE_DELAY_S = 3
TO_ZERO_DELAY_S = 3


def shipped_scaling() -> dict[str, Any]:
    """Return the `autoscaling_config` that the shipped file has for the chat model."""
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    sections = document["applications"][0]["deployments"]
    (found,) = (each for each in sections if each["name"] == MODEL_SECTION)
    scaling: dict[str, Any] = found["autoscaling_config"]
    return scaling


def scaled_config() -> dict[str, Any]:
    """Return the fault tests' configuration with the shipped policy in place of two replicas.

    Its sleep is deep, unless a test says something else.
    """
    document = config()
    application = document["applications"][0]
    (chat,) = application["args"]["models"]
    chat |= {"num_cpus": 0.3, "max_queued_requests": NUM_QUEUED, "light_sleep_after_s": None}
    section = application["deployments"][1]
    del section["num_replicas"]
    section["autoscaling_config"] = shipped_scaling() | {
        "max_replicas": MAX_NUM_REPLICAS,
        "downscale_delay_s": DOWNSCALE_DELAY_S,
        "downscale_to_zero_delay_s": TO_ZERO_DELAY_S,
    }
    section["graceful_shutdown_timeout_s"] = 30
    return document


@pytest.fixture(scope="package")
def server(changing_server: ChangingServer) -> Server:
    """Serve these tests' file."""
    return changing_server.serve(scaled_config())


@pytest.fixture
async def deployed(changing_server: ChangingServer, server: Server) -> AsyncIterator[Deployed]:
    """Return the server's configuration, which a test may change; the next one gets the first."""
    async with changing_server.changeable() as deployed:
        yield deployed


@pytest.fixture
def replicas(changing_server: ChangingServer, server: Server) -> Replicas:
    return Replicas(changing_server.folder)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(server) as client:
        yield client
