import asyncio
from typing import Any

from fastapi import FastAPI

from deployments.contract.errors import GenerationFailedError
from deployments.contract.messages import ChatMessage, TextPart
from deployments.contract.output import FinishReason, TextDelta
from tests.offenders import for_each
from tests.serve_app.apps import Client
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fakes import HELLO, FakeBackend
from tests.serve_app.sse_decoder import events_of

PATH = "/text-generation"


async def test_a_stream_is_the_default_and_counts_every_token(client: Client) -> None:
    answer = await client.post(PATH, json={"prompt": "hi"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert events_of(answer.content) == [
        {"text": "Hello", "token_count": 1, "total_token_count": 1, "token_rate": 2.0},
        {"text": ", world", "token_count": 3, "total_token_count": 4, "token_rate": 4.0},
        {"text": "!", "token_count": 1, "total_token_count": 5, "token_rate": 3.33},
        "[DONE]",
    ]


async def test_tokens_without_text_are_counted_with_the_next_text(client: Client) -> None:
    client.backend.steps = [
        [TextDelta((1,), "")],
        [TextDelta((2,), "🙂")],
        [TextDelta((3,), "", FinishReason.STOP)],
    ]
    *events, done = events_of((await client.post(PATH, json={"prompt": "hi"})).content)
    assert done == "[DONE]"
    assert [(event["text"], event["token_count"]) for event in events] == [("🙂", 2), ("", 1)]
    assert events[-1]["total_token_count"] == 3


async def test_a_whole_text_has_its_token_counts(client: Client) -> None:
    answer = await client.post(PATH, json={"prompt": "hi", "stream": False})
    assert answer.json() == {
        "response": "Hello, world!",
        "status": 200,
        "time": "2023-11-14T22:13:20+00:00",
        "token_count": 5,
        "token_rate": 10.0,
    }


async def test_a_prompt_stays_a_string_and_messages_become_messages(client: Client) -> None:
    await client.post(PATH, json={"prompt": "hi"})
    await client.post(PATH, json={"messages": [{"role": "user", "content": "hi"}], "model": "m"})
    assert [request.prompt for request in client.backend.requests] == [
        "hi",
        (ChatMessage("user", (TextPart("hi"),)),),
    ]


@for_each(
    ({}, "prompt"),
    ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
    ({"promt": "a"}, "promt"),
    ({"prompt": "a", "top_p": 7}, "top_p"),
    ({"prompt": "a", "model": "x"}, "model"),
)
async def test_an_invalid_request_is_refused_by_the_field_s_name(
    body: dict[str, Any], param: str, client: Client
) -> None:
    answer = await client.post(PATH, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


async def test_null_counts_as_absent(client: Client) -> None:
    answer = await client.post(PATH, json={"prompt": "hi", "stream": None, "stop": None})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_fields_of_older_clients_are_accepted(client: Client) -> None:
    body = {"prompt": "hi", "user_id": 1, "us_id": "x", "recommend": 0}
    assert (await client.post(PATH, json=body)).status_code == 200


async def test_a_stream_that_breaks_ends_with_an_error_and_without_done(client: Client) -> None:
    client.backend.steps = [HELLO[0], GenerationFailedError("broken")]
    events = events_of((await client.post(PATH, json={"prompt": "hi"})).content)
    assert events[0]["text"] == "Hello"
    assert events[1]["error"]["message"] == "broken"
    assert len(events) == 2


async def test_a_disconnect_closes_the_stream(app: FastAPI, backend: FakeBackend) -> None:
    backend.steps = [HELLO[0], asyncio.Event()]
    async with AsgiCall(app, PATH, {"prompt": "hi"}) as call:
        await call.wait_until(lambda: b"Hello" in call.body)
        call.leave()
        await call.end()
    assert backend.streams[0].closed.is_set()
