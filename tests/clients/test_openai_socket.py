"""OpenAI's client for Python over the WebSocket of `/v1/responses`, through a real server."""

from collections.abc import Iterator

import openai
import pytest
from openai.resources.responses.responses import ResponsesConnection
from openai.types.responses import Response

from tests.clients.questions import ANSWERS, MODEL, NAME
from tests.serve_app.local_server import LocalServer

# The SDK's own use of websockets.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:connect\(\) must be used as a context manager:DeprecationWarning"
)


@pytest.fixture
def connection(local: LocalServer) -> Iterator[ResponsesConnection]:
    with (
        local.listening() as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.responses.connect(max_retries=0) as connection,
    ):
        yield connection


def ended(connection: ResponsesConnection) -> tuple[str, Response]:
    """Return the text that came in deltas, and the whole response."""
    text = ""
    for event in connection:
        assert event.type != "error", event
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.completed":
            return text, event.response
    raise AssertionError("the connection ended before the response")


def test_a_conversation_goes_on_with_only_what_is_new(connection: ResponsesConnection) -> None:
    connection.response.create(input=f"What does {NAME} do?", model=MODEL, temperature=0)
    text, first = ended(connection)
    assert text == first.output_text == ANSWERS[NAME]
    connection.response.create(
        input="And os.getcwd?", model=MODEL, temperature=0, previous_response_id=first.id
    )
    text, second = ended(connection)
    assert text == second.output_text != ""
    assert second.previous_response_id == first.id
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
