import asyncio
import logging

import pytest
from starlette.types import Message, Receive, Scope, Send

from deployments.contract import FinishReason, TextDelta
from deployments.errors import OverloadedError, ReplicaUnavailableError
from serve_app.access_log import AccessLogMiddleware, current_record, record_of
from serve_app.key_ledger import KeyLedger
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.doors import (
    ALICE,
    CHAT,
    access_lines,
    bearer,
    behind_door,
    client_of,
    question,
    ring,
)
from tests.serve_app.fakes import HELLO, FakeBackend, Step


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_leaves_one_line(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    headers = {**bearer(ALICE), "x-request-id": "abc"}
    async with client_of(behind_door(backend, ring())) as client:
        await client.post(CHAT, json=question(stream=stream), headers=headers)
    (line,) = access_lines(caplog)
    assert line.pop("duration_ms") >= line.pop("ttft_ms") >= 0
    assert line == {
        "event": "request",
        "request_id": "abc",
        "key": "alice",
        "method": "POST",
        "route": CHAT,
        "model": "m",
        "status": 200,
        "finish_reason": "stop",
        "error_code": None,
        "prompt_tokens": 7,
        "completion_tokens": 5,
    }


async def test_a_client_that_leaves_is_named(caplog: pytest.LogCaptureFixture) -> None:
    app = behind_door(FakeBackend([*HELLO[:1], asyncio.Event()]))
    async with AsgiCall(app, CHAT, question(stream=True)) as call:
        await call.wait_until(lambda: b"Hello" in call.body)
        call.leave()
        await call.end()
    (line,) = access_lines(caplog)
    assert (line["status"], line["finish_reason"]) == (200, "client_disconnected")
    assert line["completion_tokens"] == 1


class LeavingCall(AsgiCall):
    """Leaves when it has read the last event, as OpenAI's clients do."""

    async def _send(self, message: Message) -> None:
        await super()._send(message)
        if b"[DONE]" in message.get("body", b""):
            self.leave()


async def test_who_leaves_behind_the_last_event_has_had_his_answer(
    caplog: pytest.LogCaptureFixture, backend: FakeBackend
) -> None:
    keys = ring(max_concurrent_streams=1)
    app = behind_door(backend, keys, KeyLedger(keys.limited))
    for _ in range(2):
        body = question(stream=True)
        async with LeavingCall(app, CHAT, body, headers=bearer(ALICE)) as call:
            await call.end()
        assert call.sent[0]["status"] == 200
    assert [line["finish_reason"] for line in access_lines(caplog)] == ["stop"] * 2


async def test_so_is_one_whose_request_serve_cancels(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend([*HELLO[:1], asyncio.Event()])
    async with AsgiCall(behind_door(backend), CHAT, question()) as call:
        async with asyncio.timeout(5):
            await backend.opened.wait()
            await backend.streams[0].waits.wait()
    (line,) = access_lines(caplog)
    assert (line["status"], line["finish_reason"]) == (None, "client_disconnected")
    assert call.sent == []


@pytest.mark.parametrize(("stream", "status"), [(True, 200), (False, 499)])
async def test_calls_that_serve_cancels_as_the_client_leaves_are_no_dead_replicas(
    caplog: pytest.LogCaptureFixture, stream: bool, status: int
) -> None:
    cancelled = asyncio.Event()
    backend = FakeBackend([HELLO[0], cancelled, ReplicaUnavailableError("cancelled")])
    async with AsgiCall(behind_door(backend), CHAT, question(stream=stream)) as call:
        async with asyncio.timeout(5):
            await backend.opened.wait()
            await backend.streams[0].waits.wait()
        # Serve tells the one and then does the other, and cancels the request last.
        call.leave()
        cancelled.set()
        await call.end()
    (line,) = access_lines(caplog)
    assert (line["status"], line["finish_reason"]) == (status, "client_disconnected")
    assert line["error_code"] is None


async def test_a_replica_that_dies_before_the_client_leaves_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = FakeBackend([HELLO[0], ReplicaUnavailableError("gone")])
    async with AsgiCall(behind_door(backend), CHAT, question(stream=True)) as call:
        await call.wait_until(lambda: b"error" in call.body)
        call.leave()
        await call.end()
    (line,) = access_lines(caplog)
    assert (line["finish_reason"], line["error_code"]) == ("error", "replica_unavailable")


async def test_a_stream_that_breaks_is_named(caplog: pytest.LogCaptureFixture) -> None:
    steps: list[Step] = [[TextDelta((1,), "a")], ReplicaUnavailableError("gone")]
    async with client_of(behind_door(FakeBackend(steps))) as client:
        await client.post(CHAT, json=question(stream=True))
    (line,) = access_lines(caplog)
    assert (line["status"], line["finish_reason"]) == (200, "error")
    assert line["error_code"] == "replica_unavailable"


async def test_an_overload_is_told_by_its_status_and_code(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.refusal = OverloadedError("busy", None, 17)
    async with client_of(behind_door(backend)) as client:
        await client.post(CHAT, json=question())
    (line,) = access_lines(caplog)
    assert (line["status"], line["finish_reason"]) == (503, None)
    assert line["model"] == "m"
    assert line["error_code"] == "overloaded"


@pytest.mark.parametrize(("stream", "status"), [(False, 504), (True, 200)])
async def test_an_answer_that_is_late_is_told_by_the_deadline_s_code(
    caplog: pytest.LogCaptureFixture, stream: bool, status: int
) -> None:
    backend = FakeBackend([HELLO[0], asyncio.Event()])
    app = behind_door(backend, limits={"stall_timeout_s": 0.02})
    async with client_of(app) as client:
        await client.post(CHAT, json=question(stream=stream))
    (line,) = access_lines(caplog)
    assert (line["status"], line["finish_reason"]) == (status, "error")
    assert line["error_code"] == "stall_timeout"


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [
        ("/nowhere", bearer(ALICE), 404, "not_found"),
        ("/nowhere", {}, 401, "invalid_api_key"),
        ("/health", {}, 200, None),
    ],
)
async def test_refusals_leave_a_line_too_and_it_holds_no_path(
    backend: FakeBackend,
    caplog: pytest.LogCaptureFixture,
    path: str,
    headers: dict[str, str],
    status: int,
    code: str | None,
) -> None:
    async with client_of(behind_door(backend, ring())) as client:
        await client.get(path, headers=headers)
    (line,) = access_lines(caplog)
    assert (line["status"], line["model"], line["ttft_ms"]) == (status, None, None)
    assert line["error_code"] == code
    assert "nowhere" not in str(line)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_calls_ends_with_its_calls(
    caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    backend = FakeBackend([[TextDelta((1,), text, FinishReason.STOP)]], tool_call_format="hermes")
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with client_of(behind_door(backend)) as client:
        answer = await client.post(CHAT, json=question(stream=stream, tools=tools))
    assert '"tool_calls"' in answer.text
    (line,) = access_lines(caplog)
    assert line["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("POST", "/tokenize", "/tokenize"),
        ("GET", "/v1/models/m", "/v1/models/{model_id:path}"),
        ("GET", "/v1/models/secret", "/v1/models/{model_id:path}"),
        ("DELETE", CHAT, CHAT),
        ("GET", "/secret", None),
    ],
)
async def test_a_line_names_the_route_and_nothing_that_a_client_put_there(
    backend: FakeBackend,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    route: str | None,
) -> None:
    async with client_of(behind_door(backend)) as client:
        await client.request(method, path, json={"prompt": "secret"})
    (line,) = access_lines(caplog)
    assert line["route"] == route
    assert line["model"] == ("m" if path == "/tokenize" else None)
    assert "secret" not in str(line)


async def test_a_bug_of_ours_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend()
    backend.refusal = RuntimeError("a bug")
    async with client_of(behind_door(backend)) as client:
        await client.post(CHAT, json=question())
    (line,) = access_lines(caplog)
    assert (line["status"], line["error_code"]) == (500, "internal_error")


async def test_lines_can_be_left_out_but_not_the_records(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[float] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        record = current_record()
        assert record is record_of(scope)
        record.gained(2, None)
        assert record.first_token_s is not None
        seen.append(record.first_token_s - record.started_s)

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    times = iter([10.0, 10.5])
    middleware = AccessLogMiddleware(app, writes=False, now=lambda: next(times))
    scope = {"type": "http", "method": "GET", "state": {"request_id": "x"}}
    await middleware(scope, receive, send)
    assert seen == [0.5]
    assert access_lines(caplog) == []
    assert current_record() is None
