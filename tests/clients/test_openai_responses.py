"""`openai` for Python: responses, whole, streamed and parsed, and a loop of tools.

The embedded model was trained neither for tools nor for JSON. Only the grammar makes those answers
valid, so the tests of them check their form, not their meaning.
"""

import json
from random import Random
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel

from models.training.drawings import answer_about, random_drawing
from tests.clients.conftest import Narrow
from tests.clients.questions import ANSWERS, MODEL, NAME, NARROW
from tests.clients.snippet import run_snippet
from tests.engines import only_raystream
from tests.images import data_uri
from tests.serve_app.local_server import LocalServer

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Sky(BaseModel):
    colour: Literal["blue", "grey"]
    is_windy: bool


def about(name: str, **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": f"What does {name} do?", "temperature": 0, **options}


def call_of(response: Response) -> ResponseFunctionToolCall:
    (call,) = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    return call


def test_a_whole_answer(client: openai.OpenAI) -> None:
    response = client.responses.create(**about(NAME), store=False)
    assert response.output_text == ANSWERS[NAME]
    assert (response.model, response.status, response.error) == (MODEL, "completed", None)
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response._request_id


def test_a_streamed_answer_joins_to_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.responses.create(**about(NAME))
    events = list(client.responses.create(**about(NAME), stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == ANSWERS[NAME]
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert whole.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens


def test_the_sdk_s_stream_reader_gives_the_same_answer(client: openai.OpenAI) -> None:
    with client.responses.stream(**about(NAME)) as stream:
        seen = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert seen == final.output_text == ANSWERS[NAME]


async def test_the_asynchronous_client_reads_a_stream(async_client: openai.AsyncOpenAI) -> None:
    async with async_client.responses.stream(**about(NAME)) as stream:
        final = await stream.get_final_response()
    assert final.output_text == ANSWERS[NAME]


def test_a_parsed_answer_is_an_instance_of_the_requested_model(client: openai.OpenAI) -> None:
    assert isinstance(client.responses.parse(**about(NAME), text_format=Sky).output_parsed, Sky)
    with client.responses.stream(**about(NAME), text_format=Sky) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Sky)


def test_a_truncated_answer_says_so(client: openai.OpenAI) -> None:
    response = client.responses.create(**about(NAME, max_output_tokens=3))
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_a_second_turn_takes_the_first_one_s_output(client: openai.OpenAI) -> None:
    first = client.responses.create(**about(NAME), instructions="You explain Python.")
    items: list[Any] = [
        {"role": "user", "content": f"What does {NAME} do?"},
        *first.output,
        {"role": "user", "content": "What does os.getcwd do?"},
    ]
    assert client.responses.create(**about(NAME, input=items)).output_text


@only_raystream("images are refused with vLLM")
def test_a_drawing_is_described(client: openai.OpenAI) -> None:
    drawing = random_drawing(Random(7))
    content = [
        {"type": "input_image", "image_url": data_uri(drawing.render()), "detail": "auto"},
        {"type": "input_text", "text": "What is in the picture?"},
    ]
    response = client.responses.create(**about(NAME, input=[{"role": "user", "content": content}]))
    assert response.output_text == answer_about(drawing)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_loop_of_tools(client: openai.OpenAI, choice: Any) -> None:
    asked = about(NAME, tools=[WEATHER], parallel_tool_calls=False)
    first = client.responses.create(**asked, tool_choice=choice)
    result = {"type": "function_call_output", "call_id": call_of(first).call_id, "output": "clear"}
    asked["input"] = [{"role": "user", "content": asked["input"]}, *first.output, result]
    second = client.responses.create(**asked)
    assert second.status in ("completed", "incomplete")
    assert second.output


def test_a_streamed_call_is_the_whole_one(client: openai.OpenAI) -> None:
    asked = about(NAME, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    whole = call_of(client.responses.create(**asked))
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = call_of(stream.get_final_response())
    assert "response.function_call_arguments.done" in kinds
    assert (streamed.name, streamed.arguments) == (whole.name, whole.arguments)


@pytest.mark.parametrize("unknown", [{"previous_response_id": "resp_1"}, {"conversation": "c"}])
def test_what_is_not_there_is_refused_by_name(client: openai.OpenAI, unknown: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**about(NAME), **unknown)
    assert caught.value.param == next(iter(unknown))


def test_a_stored_conversation_is_the_one_that_a_client_would_send(client: openai.OpenAI) -> None:
    first = client.responses.create(**about(NAME), instructions="You explain Python.")
    follows = about(NAME, input="What does os.getcwd do?", instructions="You explain Python.")
    second = client.responses.create(**follows, previous_response_id=first.id)
    items: list[Any] = [
        {"role": "user", "content": f"What does {NAME} do?"},
        *first.output,
        {"role": "user", "content": "What does os.getcwd do?"},
    ]
    follows["input"] = items
    whole = client.responses.create(**follows, store=False)
    assert second.output_text == whole.output_text
    assert second.usage is not None
    assert whole.usage is not None
    assert second.usage.input_tokens == whole.usage.input_tokens


def test_a_response_is_stored_shown_listed_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(**about(NAME), metadata={"a": "b"})
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    (item,) = client.responses.input_items.list(made.id)
    assert item.type == "message"
    assert item.role == "user"
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_response_in_the_background_is_read_by_its_events(client: openai.OpenAI) -> None:
    made = client.responses.create(**about(NAME), background=True)
    assert made.status == "queued"
    events = list(client.responses.retrieve(made.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == ANSWERS[NAME]
    rest = list(client.responses.retrieve(made.id, stream=True, starting_after=4))
    assert rest == events[5:]
    assert client.responses.retrieve(made.id).to_dict() == last.response.to_dict()
    assert client.responses.cancel(made.id).status == "completed"


def test_a_stream_in_the_background_is_that_of_a_waiting_client(client: openai.OpenAI) -> None:
    events = list(client.responses.create(**about(NAME), background=True, stream=True))
    assert [each.type for each in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWERS[NAME]


def test_a_response_in_the_background_is_cancelled(client: openai.OpenAI, held: Narrow) -> None:
    made = client.responses.create(model=NARROW, input="a", background=True)
    held.wait_until_admitted(1)
    assert client.responses.cancel(made.id).status == "cancelled"
    held.wait_until_admitted(0)
    assert client.responses.retrieve(made.id).status == "cancelled"


def test_the_snippet_of_stored_responses_runs(
    local: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run_snippet("OpenAI's responses, stored and in the background", local)
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "completed ['message', 'message', 'message']"


def test_the_snippet_of_the_page_runs(
    local: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run_snippet("OpenAI's responses: openai for Python", local)
    printed = capsys.readouterr().out
    assert printed.startswith(ANSWERS[NAME])
    assert printed.removeprefix(ANSWERS[NAME]).strip()
