"""OpenAI's client for Python over the WebSocket of `/v1/responses`, through a real server."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.lib.responses_websocket import ResponsesWebSocketLimits, ResponsesWebSocketSession
from openai.resources.responses.responses import ResponsesConnection
from openai.types.responses import Response, ResponseFunctionToolCall

from tests.clients.questions import (
    ANSWERS,
    ARGUMENTS,
    FIRST_WORDS,
    LAST_WORDS,
    MODEL,
    NAME,
    SCRIPTED,
    TOOL,
)
from tests.engines import only_raystream
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


def created(**fields: Any) -> Any:
    """Return the frame that asks for a response."""
    return {"type": "response.create", "model": MODEL, "temperature": 0, **fields}


def test_lanes_of_one_connection_go_on_apart(connection: ResponsesConnection) -> None:
    limits = ResponsesWebSocketLimits(
        max_lanes=3,  # one is for what has no name
        max_events_per_lane=4096,
        max_events=8192,
        max_bytes_per_lane=2**24,
        max_bytes=2**25,
        max_response_bytes=None,
    )
    with ResponsesWebSocketSession(connection, limits=limits) as session:
        main, side = session.lane("main"), session.lane("side")
        main.send(created(input=f"What does {NAME} do?"))
        side.send(created(input="What does os.getcwd do?"))
        first, other = (lane.get_final_response(timeout=60) for lane in (main, side))
        assert (first.output_text, other.output_text) == (ANSWERS[NAME], ANSWERS["os.getcwd"])
        side.send(created(input="And os.getcwd?", previous_response_id=first.id))
        assert side.get_final_response(timeout=60).previous_response_id == first.id


@only_raystream("with vLLM fewer models are served")
def test_a_model_calls_a_tool_of_its_own_accord_and_goes_on_with_the_result(
    connection: ResponsesConnection,
) -> None:
    tool: Any = {"type": "function", "name": TOOL, "parameters": {"type": "object"}}
    connection.response.create(input="Look it up.", model=SCRIPTED, tools=[tool])
    text, first = ended(connection)
    message, call = first.output
    assert text == first.output_text == "".join(FIRST_WORDS)
    assert message.type == "message"
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, call.arguments) == (TOOL, ARGUMENTS)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It joins."}
    connection.response.create(
        input=[result], model=SCRIPTED, tools=[tool], previous_response_id=first.id
    )
    text, second = ended(connection)
    assert text == second.output_text == "".join(LAST_WORDS)
