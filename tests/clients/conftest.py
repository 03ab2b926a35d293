from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from tests.clients.held_generator import HELD, Held
from tests.clients.questions import NARROW
from tests.clients.served_models import in_process
from tests.engines import EngineName
from tests.serve_app.local_server import LocalServer, local_server


@pytest.fixture(scope="package")
def local(
    tmp_path_factory: pytest.TempPathFactory, engine_name: EngineName
) -> Iterator[LocalServer]:
    """Run the application and its models in this process."""
    config = in_process(tmp_path_factory.mktemp("models"), engine_name)
    with local_server(config, HELD[engine_name]) as running:
        yield running


@pytest.fixture
def client(local: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{local.url}/v1", api_key="none", max_retries=0, http_client=local.client()
    ) as client:
        yield client


@pytest.fixture
async def async_client(local: LocalServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{local.url}/v1", api_key="none", max_retries=0, http_client=local.async_client()
    ) as client:
        yield client


class Narrow:
    """The narrow model's replica."""

    def __init__(self, local: LocalServer) -> None:
        replica = local.replicas[NARROW]
        assert isinstance(replica, Held)
        self._replica = replica
        self._portal = local.portal

    def hold(self) -> None:
        self._portal.call(self._replica.hold)

    def let_go(self) -> None:
        self._portal.call(self._replica.let_go)

    def wait_until_admitted(self, num_requests: int) -> None:
        self._portal.call(self._replica.wait_until_admitted, num_requests)


@pytest.fixture
def held(local: LocalServer) -> Iterator[Narrow]:
    """Hold the narrow model: its answers begin, and don't end before the test lets it go."""
    narrow = Narrow(local)
    narrow.wait_until_admitted(0)
    narrow.hold()
    yield narrow
    narrow.let_go()
    narrow.wait_until_admitted(0)
