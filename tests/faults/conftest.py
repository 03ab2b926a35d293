from collections.abc import AsyncIterator

import httpx
import pytest

from deployments.text_generator import TextGenerator
from serve_app.config import AppConfig
from tests.faults.cut_replicas import Cuts, client_of_all


@pytest.fixture(scope="module")
def cuts() -> Cuts:
    return Cuts()


@pytest.fixture
async def client(replicas: list[TextGenerator]) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client of the replicas of a module in process, whose streams are cut."""
    config = AppConfig.model_validate({"models": [{"id": "m", "source": "nowhere"}]})
    async with client_of_all(replicas, config) as client:
        yield client
