from collections.abc import AsyncIterator

import httpx
import pytest

from deployments.generator_replica import GeneratorReplica
from serve_app.config import AppConfig
from tests.faults.cut_replicas import Cuts, client_of_all


@pytest.fixture(scope="module")
def cuts() -> Cuts:
    return Cuts()


@pytest.fixture
async def client(replicas: list[GeneratorReplica]) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client of the replicas of a module in process, whose streams are cut.

    An engine that an earlier test has lost fails the next ones at once: each would take minutes.
    """
    for replica in replicas:
        replica._engine.require_alive()
    config = AppConfig.model_validate({"models": [{"id": "m", "source": "nowhere"}]})
    async with client_of_all(replicas, config) as client:
        yield client
