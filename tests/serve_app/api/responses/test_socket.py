import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from openai.types.responses import Response

from deployments.contract.errors import GenerationFailedError, OverloadedError
from deployments.contract.messages import ChatMessage, TextPart
from serve_app.api.responses.socket import MAX_ANSWERED, MAX_WAITING
from tests.serve_app.api.responses.test_routes import TOOL, kinds_of, streamed
from tests.serve_app.apps import ALICE, Client, access_lines, bearer, keeping, make_app, ring
from tests.serve_app.asgi_socket import LAST, AsgiSocket
from tests.serve_app.fakes import CALL, HELLO, FakeBackend, text_of
from tests.serve_app.middleware.test_rate_limits import CountedLedger


def said(backend: FakeBackend) -> list[tuple[str, str]]:
    """Return the roles and texts of the messages that the model was asked with last."""
    prompt = backend.requests[-1].prompt
    assert isinstance(prompt, tuple)
    messages = [each for each in prompt if isinstance(each, ChatMessage)]
    return [
        (each.role, "".join(part.text for part in each.parts if isinstance(part, TextPart)))
        for each in messages
    ]


async def test_a_turn_s_events_are_those_of_the_stream(client: Client, app: FastAPI) -> None:
    streamed_events = await streamed(client)
    async with AsgiSocket(app) as socket:
        events = await socket.ask(input="hi")
    assert kinds_of(events) == kinds_of(streamed_events)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    Response.model_validate(events[-1]["response"])
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello, world!"


async def test_deltas_are_sent_as_they_arrive(app: FastAPI, backend: FakeBackend) -> None:
    release = asyncio.Event()
    backend.steps = [HELLO[0], release, *HELLO[1:]]
    async with AsgiSocket(app) as socket:
        socket.create(input="hi")
        await socket.wait_until(lambda: any("delta" in event for event in socket.events))
        assert socket.events[-1]["delta"] == "Hello"
        release.set()
        assert (await socket.turn())[-1]["type"] == "response.completed"


async def test_a_turn_continues_the_last_response_with_only_its_new_input(
    app: FastAPI, backend: FakeBackend
) -> None:
    async with AsgiSocket(app) as socket:
        first = (await socket.ask(input="hi"))[-1]["response"]
        again = [{"role": "user", "content": "and?"}]
        events = await socket.ask(input=again, previous_response_id=first["id"])
        second = events[-1]["response"]
        assert said(backend) == [("user", "hi"), ("assistant", "Hello, world!"), ("user", "and?")]
        assert first["previous_response_id"] is None
        for event in (events[0], events[1], events[-1]):
            assert event["response"]["previous_response_id"] == first["id"]
        await socket.ask(input="so?", previous_response_id=second["id"])
        assert len(said(backend)) == 5


async def test_instructions_are_those_of_the_turn(app: FastAPI, backend: FakeBackend) -> None:
    async with AsgiSocket(app) as socket:
        first = (await socket.ask(input="hi", instructions="Be brief."))[-1]["response"]
        assert said(backend)[0] == ("system", "Be brief.")
        await socket.ask(input="and?", previous_response_id=first["id"])
        assert said(backend)[0] == ("user", "hi")


async def test_a_tool_s_result_continues_the_call() -> None:
    backend = FakeBackend(text_of("Well. ", *CALL), tool_call_format="hermes")
    async with AsgiSocket(make_app(backend)) as socket:
        first = (await socket.ask(input="hi", tools=[TOOL]))[-1]["response"]
        call = first["output"][1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
        backend.steps = HELLO
        last = await socket.ask(input=[result], tools=[TOOL], previous_response_id=first["id"])
        assert last[-1]["type"] == "response.completed"
        assert [role for role, _ in said(backend)] == ["user", "assistant", "tool"]


async def test_only_the_last_response_of_the_connection_is_kept(app: FastAPI) -> None:
    async with AsgiSocket(app) as socket, AsgiSocket(app) as other:
        first = (await socket.ask(input="hi"))[-1]["response"]
        second = (await socket.ask(input="hi"))[-1]["response"]
        for asking, previous in ((socket, first["id"]), (other, second["id"]), (other, 7)):
            event = await asking.refused(input="and?", previous_response_id=previous)
            assert (event["status"], event["error"]["code"]) == (400, "previous_response_not_found")
            assert event["error"]["param"] == "previous_response_id"
        last = await socket.ask(input="and?", previous_response_id=second["id"])
        assert last[-1]["type"] == "response.completed"


async def test_another_id_is_that_of_a_stored_response_where_there_is_a_store(
    backend: FakeBackend, tmp_path: Path
) -> None:
    app = make_app(backend, jobs={"folder": str(tmp_path / "jobs")})
    async with keeping(app), AsgiSocket(app) as socket, AsgiSocket(app) as other:
        first = (await socket.ask(input="hi"))[-1]["response"]
        second = (await other.ask(input="and?", previous_response_id=first["id"]))[-1]["response"]
        assert said(backend) == [("user", "hi"), ("assistant", "Hello, world!"), ("user", "and?")]
        await other.ask(input="so?", previous_response_id=second["id"])
        assert len(said(backend)) == 5
        event = await other.refused(input="so?", previous_response_id="resp_nowhere")
        assert (event["status"], event["error"]["code"]) == (400, "previous_response_not_found")


async def test_a_warm_up_generates_nothing_and_keeps_its_input(
    app: FastAPI, backend: FakeBackend
) -> None:
    async with AsgiSocket(app) as socket:
        created, completed = await socket.ask(input="hi", generate=False)
        assert created["type"] == "response.created"
        response = completed["response"]
        Response.model_validate(response)
        assert (response["output"], response["usage"]["total_tokens"]) == ([], 0)
        assert backend.num_calls == 0
        await socket.ask(input="and?", previous_response_id=response["id"])
        assert said(backend) == [("user", "hi"), ("user", "and?")]


@pytest.mark.parametrize("fields", [{}, {"input": []}, {"input": ""}])
async def test_a_warm_up_needs_no_input(
    app: FastAPI, backend: FakeBackend, fields: dict[str, Any]
) -> None:
    async with AsgiSocket(app) as socket:
        warmed = (await socket.ask(generate=False, **fields))[-1]["response"]
        await socket.ask(input="hi", previous_response_id=warmed["id"])
        assert said(backend)[-1] == ("user", "hi")


async def test_a_warm_up_is_checked_as_a_turn_is(app: FastAPI) -> None:
    async with AsgiSocket(app) as socket:
        event = await socket.refused(input="hi", generate=False, model="none")
        assert (event["status"], event["error"]["code"]) == (404, "model_not_found")
        event = await socket.refused(input="hi", generate=False, temperature=9)
        assert event["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("frame", "param"),
    [
        ("{", None),
        ("[]", "type"),
        ('{"type": "response.steer"}', "type"),
        ('{"type": {}}', "type"),
        (b"{}", None),
        ('{"type": "response.create", "model": "m", "input": "hi", "generate": 1}', "generate"),
        ('{"type": "response.create", "model": "m", "input": "hi", "stream_id": 1}', "stream_id"),
        ('{"type": "response.create", "model": "m", "input": "hi", "stream_id": ""}', "stream_id"),
        ('{"type": "response.create", "model": "m"}', "input"),
        ('{"type": "response.create", "model": "m", "input": 7}', "input"),
        ('{"type": "response.create", "model": "m", "input": "hi", "nowhere": 7}', "nowhere"),
        (
            '{"type": "response.create", "model": "m", "input": "hi", "background": true}',
            "background",
        ),
    ],
)
async def test_a_frame_that_is_refused_leaves_the_connection_open(
    app: FastAPI, frame: str | bytes, param: str | None
) -> None:
    async with AsgiSocket(app) as socket:
        socket.put(frame)
        (event,) = await socket.turn()
        assert (event["type"], event["status"]) == ("error", 400)
        assert event["error"]["type"] == "invalid_request_error"
        assert event["error"]["param"] == param
        assert event["headers"]["x-should-retry"] == "false"
        assert (await socket.ask(input="hi"))[-1]["type"] == "response.completed"


async def test_a_client_s_notice_is_not_answered(app: FastAPI) -> None:
    async with AsgiSocket(app) as socket:
        socket.put('{"type": "response.processed", "response_id": "resp_1"}')
        assert (await socket.ask(input="hi"))[0]["type"] == "response.created"


async def test_an_overload_tells_when_to_come_back(app: FastAPI, backend: FakeBackend) -> None:
    backend.refusal = OverloadedError("full", None, 7)
    async with AsgiSocket(app) as socket:
        event = await socket.refused(input="hi")
    assert (event["status"], event["error"]["code"]) == (503, "overloaded")
    assert event["headers"]["retry-after"] == "7"
    assert len(event["headers"]["x-request-id"]) == 32


async def test_a_broken_answer_ends_its_turn_and_not_the_conversation(
    app: FastAPI, backend: FakeBackend
) -> None:
    async with AsgiSocket(app) as socket:
        first = (await socket.ask(input="hi"))[-1]["response"]
        backend.steps = [*HELLO[:1], GenerationFailedError("gone")]
        failed = (await socket.ask(input="and?", previous_response_id=first["id"]))[-1]
        assert failed["type"] == "response.failed"
        backend.steps = HELLO
        again = await socket.ask(input="and?", previous_response_id=first["id"])
        assert again[-1]["type"] == "response.completed"


async def test_a_bug_is_told_as_a_500(
    app: FastAPI, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.refusal = ZeroDivisionError("secret")
    async with AsgiSocket(app) as socket:
        event = await socket.refused(input="hi")
        assert (event["status"], event["error"]["code"]) == (500, "internal_error")
        assert "secret" not in json.dumps(event)
        backend.refusal = None
        assert (await socket.ask(input="hi"))[-1]["type"] == "response.completed"
    assert "the server has failed at" in caplog.text


async def test_frames_are_answered_one_after_the_other(app: FastAPI, backend: FakeBackend) -> None:
    release = asyncio.Event()
    backend.steps = [release, *HELLO]
    async with AsgiSocket(app) as socket:
        socket.create(input="hi")
        socket.create(input="and?")
        await backend.opened.wait()
        assert len(backend.requests) == 1
        release.set()
        for _ in range(2):
            assert (await socket.turn())[-1]["type"] == "response.completed"
    assert len(backend.requests) == 2


async def test_streams_are_answered_side_by_side_and_each_event_names_its_own(
    app: FastAPI, backend: FakeBackend
) -> None:
    release = asyncio.Event()
    backend.scripts = [[HELLO[0], release, *HELLO[1:]], list(HELLO)]
    async with AsgiSocket(app) as socket:
        socket.create(input="slow", stream_id="main")
        socket.create(input="waits", stream_id="main")
        await socket.wait_until(lambda: any("delta" in event for event in socket.events))
        socket.create(input="fast", stream_id="side.1")
        await socket.wait_until(lambda: ended(socket.events) == ["side.1"])
        assert len(backend.requests) == 2
        release.set()
        await socket.wait_until(lambda: ended(socket.events) == ["side.1", "main", "main"])
    assert {event["stream_id"] for event in socket.events} == {"main", "side.1"}
    for name, num_turns in (("main", 2), ("side.1", 1)):
        events = [event for event in socket.events if event["stream_id"] == name]
        assert sum(event["type"] == "response.created" for event in events) == num_turns
        numbers = [event["sequence_number"] for event in events]
        assert numbers == [*range(len(events) // num_turns)] * num_turns


def ended(events: list[dict[str, Any]]) -> list[str | None]:
    """Return the streams of the turns that have ended, in order."""
    return [event.get("stream_id") for event in events if event["type"] in LAST]


async def test_a_new_stream_continues_the_last_response_of_another(
    app: FastAPI, backend: FakeBackend
) -> None:
    async with AsgiSocket(app) as socket:
        first = (await socket.ask(input="hi", stream_id="main"))[-1]["response"]
        for name in ("side", "main"):
            again = await socket.ask(input=name, stream_id=name, previous_response_id=first["id"])
            assert again[-1]["type"] == "response.completed"
            assert said(backend) == [("user", "hi"), ("assistant", "Hello, world!"), ("user", name)]
        # It is the last response of no stream any more.
        event = await socket.refused(input="and?", previous_response_id=first["id"])
        assert event["error"]["code"] == "previous_response_not_found"
        assert "stream_id" not in event


async def test_what_a_stream_is_refused_names_it(app: FastAPI) -> None:
    async with AsgiSocket(app) as socket:
        for fields in (
            {"temperature": 9},
            {"previous_response_id": "resp_nowhere"},
            {"generate": 1},
            {"type": "response.cancel"},
        ):
            event = await socket.refused(input="hi", stream_id="main", **fields)
            assert (event["status"], event["stream_id"]) == (400, "main")


async def test_a_bounded_number_of_streams_is_answered_side_by_side(
    app: FastAPI, backend: FakeBackend
) -> None:
    release = asyncio.Event()
    backend.steps = [release, *HELLO]
    async with AsgiSocket(app) as socket:
        for at in range(MAX_ANSWERED + 2):
            socket.create(input="hi", stream_id=f"{at}")
        await socket.wait_until(lambda: len(backend.requests) == MAX_ANSWERED)
        release.set()
        await socket.wait_until(lambda: len(ended(socket.events)) == MAX_ANSWERED + 2)
    assert ended(socket.events)[-1] in ("8", "9")


async def test_a_client_that_leaves_ends_its_answer(
    app: FastAPI, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve.raystream.access")
    backend.steps = [HELLO[0], asyncio.Event()]
    async with AsgiSocket(app) as socket:
        socket.create(input="hi")
        await socket.wait_until(lambda: any("delta" in event for event in socket.events))
        socket.leave()
        await socket.end()
    assert backend.streams[0].closed.is_set()
    assert access_lines(caplog)[-1]["finish_reason"] == "client_disconnected"


async def test_a_client_that_is_found_gone_ends_its_answer(
    app: FastAPI, backend: FakeBackend
) -> None:
    release = asyncio.Event()
    backend.steps = [HELLO[0], release, HELLO[1], asyncio.Event()]
    async with AsgiSocket(app) as socket:
        socket.create(input="hi")
        await socket.wait_until(lambda: any("delta" in event for event in socket.events))
        socket.gone = True
        release.set()
        await socket.end()
    assert backend.streams[0].closed.is_set()


async def test_a_client_that_floods_is_dropped(app: FastAPI, backend: FakeBackend) -> None:
    backend.steps = [HELLO[0], asyncio.Event()]
    async with AsgiSocket(app) as socket:
        for _ in range(MAX_WAITING + 2):
            socket.create(input="hi")
        await socket.end()
        assert socket.close_code == 1008
    assert all(stream.closed.is_set() for stream in backend.streams)


async def test_frames_that_wait_are_bounded_in_bytes(app: FastAPI, backend: FakeBackend) -> None:
    backend.steps = [HELLO[0], asyncio.Event()]
    async with AsgiSocket(app) as socket:
        for _ in range(3):
            socket.create(input="a" * 40_000)  # of max_body_bytes: 65536
        await socket.end()
        assert socket.close_code == 1008


async def test_a_frame_is_bounded_as_a_body_is(app: FastAPI) -> None:
    async with AsgiSocket(app) as socket:
        event = await socket.refused(input="a" * 70_000)
        assert (event["status"], event["error"]["code"]) == (413, "request_too_large")


async def test_a_client_that_reads_nothing_is_dropped(backend: FakeBackend) -> None:
    app = make_app(backend, limits={"slow_reader_timeout_s": 0.05})
    async with AsgiSocket(app) as socket:
        socket.held = asyncio.Event()
        socket.create(input="hi")
        await socket.wait_until(lambda: backend.streams != [])
        async with asyncio.timeout(30):
            await backend.streams[0].closed.wait()
        socket.held.set()
        await socket.end()
        assert socket.close_code == 1011


async def test_each_turn_counts_for_its_key(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve.raystream.access")
    keys = ring(requests_per_minute=1)
    app = make_app(backend, keys, CountedLedger(keys.limited))
    async with AsgiSocket(app, headers=bearer(ALICE)) as socket:
        assert (await socket.ask(input="hi"))[-1]["type"] == "response.completed"
        event = await socket.refused(input="hi")
    assert (event["status"], event["error"]["code"]) == (429, "rate_limit_exceeded")
    assert event["headers"]["x-ratelimit-remaining-requests"] == "0"
    assert [(line["method"], line["status"], line["key"]) for line in access_lines(caplog)] == [
        ("GET", 101, "alice"),
        ("POST", 200, "alice"),
        ("POST", 429, "alice"),
    ]
    assert access_lines(caplog)[0]["route"] == "/v1/responses"


async def test_an_old_connection_ends_between_two_turns(backend: FakeBackend) -> None:
    release = asyncio.Event()
    backend.steps = [release, *HELLO]
    app = make_app(backend, limits={"max_socket_s": 0.01})
    async with AsgiSocket(app) as socket:
        socket.create(input="hi")
        await backend.opened.wait()
        asyncio.get_running_loop().call_later(0.02, release.set)
        assert (await socket.turn())[-1]["type"] == "response.completed"
        (event,) = await socket.turn()
        assert event["error"]["code"] == "websocket_connection_limit_reached"
        await socket.end()
        assert socket.close_code == 1012
