import asyncio
import logging

import pytest
from starlette.types import Message, Receive, Scope, Send

from deployments.contract.errors import GenerationFailedError, OverloadedError
from deployments.contract.output import FinishReason, TextDelta
from serve_app.backends.replicas.replica_errors import ReplicaStoppedError
from serve_app.http.request_record import current_record, record_of
from serve_app.keys.ledger import KeyLedger
from serve_app.middleware.access_log import AccessLogMiddleware
from tests.serve_app.apps import (
    ALICE,
    CHAT,
    access_lines,
    bearer,
    client_of,
    make_app,
    question,
    ring,
)
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fakes import HELLO, FakeBackend, Step


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_writes_one_line(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    headers = {**bearer(ALICE), "x-request-id": "abc"}
    async with client_of(make_app(backend, ring())) as client:
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
        "moves": 0,
        "parked": 0,
    }


async def test_a_client_that_leaves_is_logged_as_disconnected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app(FakeBackend([*HELLO[:1], asyncio.Event()]))
    async with AsgiCall(app, CHAT, question(stream=True)) as call:
        await call.wait_until(lambda: b"Hello" in call.body)
        call.leave()
        await call.end()
    (line,) = access_lines(caplog)
    assert (line["status"], line["finish_reason"]) == (200, "client_disconnected")
    assert line["completion_tokens"] == 1


class LeavingCall(AsgiCall):
    """Disconnects after the last event, as OpenAI's clients do."""

    async def _send(self, message: Message) -> None:
        await super()._send(message)
        if b"[DONE]" in message.get("body", b""):
            self.leave()


async def test_a_client_that_leaves_after_the_last_event_is_not_logged_as_disconnected(
    caplog: pytest.LogCaptureFixture, backend: FakeBackend
) -> None:
    keys = ring(max_concurrent_streams=1)
    app = make_app(backend, keys, KeyLedger(keys.limited))
    for _ in range(2):
        body = question(stream=True)
        async with LeavingCall(app, CHAT, body, headers=bearer(ALICE)) as call:
            await call.end()
        assert call.sent[0]["status"] == 200
    assert [line["finish_reason"] for line in access_lines(caplog)] == ["stop"] * 2


async def test_a_request_that_serve_cancels_is_logged_as_disconnected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = FakeBackend([*HELLO[:1], asyncio.Event()])
    async with AsgiCall(make_app(backend), CHAT, question()) as call:
        async with asyncio.timeout(30):
            await backend.opened.wait()
            await backend.streams[0].waits.wait()
    (line,) = access_lines(caplog)
    assert (line["status"], line["finish_reason"]) == (None, "client_disconnected")
    assert call.sent == []


@pytest.mark.parametrize(("stream", "status"), [(True, 200), (False, 499)])
async def test_calls_that_serve_cancels_for_a_leaving_client_are_not_replica_failures(
    caplog: pytest.LogCaptureFixture, stream: bool, status: int
) -> None:
    cancelled = asyncio.Event()
    backend = FakeBackend([HELLO[0], cancelled, ReplicaStoppedError("cancelled")])
    async with AsgiCall(make_app(backend), CHAT, question(stream=stream)) as call:
        async with asyncio.timeout(30):
            await backend.opened.wait()
            await backend.streams[0].waits.wait()
        # The order in Serve: the disconnect, the replica's cancelled call, the cancelled request.
        call.leave()
        cancelled.set()
        await call.end()
    (line,) = access_lines(caplog)
    assert (line["status"], line["finish_reason"]) == (status, "client_disconnected")
    assert line["error_code"] is None


async def test_an_error_before_the_client_leaves_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = FakeBackend([HELLO[0], GenerationFailedError("broken")])
    async with AsgiCall(make_app(backend), CHAT, question(stream=True)) as call:
        await call.wait_until(lambda: b"error" in call.body)
        call.leave()
        await call.end()
    (line,) = access_lines(caplog)
    assert (line["finish_reason"], line["error_code"]) == ("error", "generation_failed")


async def test_a_stream_that_breaks_is_logged_with_its_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps: list[Step] = [[TextDelta((1,), "a")], GenerationFailedError("broken")]
    async with client_of(make_app(FakeBackend(steps))) as client:
        await client.post(CHAT, json=question(stream=True))
    (line,) = access_lines(caplog)
    assert (line["status"], line["finish_reason"]) == (200, "error")
    assert line["error_code"] == "generation_failed"


async def test_an_overload_is_logged_with_its_status_and_code(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.refusal = OverloadedError("busy", None, 17)
    async with client_of(make_app(backend)) as client:
        await client.post(CHAT, json=question())
    (line,) = access_lines(caplog)
    assert (line["status"], line["finish_reason"]) == (503, None)
    assert line["model"] == "m"
    assert line["error_code"] == "overloaded"


@pytest.mark.parametrize(("stream", "status"), [(False, 504), (True, 200)])
async def test_a_late_answer_is_logged_with_the_code_of_its_deadline(
    caplog: pytest.LogCaptureFixture, stream: bool, status: int
) -> None:
    backend = FakeBackend([HELLO[0], asyncio.Event()])
    async with client_of(make_app(backend, limits={"stall_timeout_s": 0.02})) as client:
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
async def test_a_refusal_writes_a_line_without_the_clients_path(
    backend: FakeBackend,
    caplog: pytest.LogCaptureFixture,
    path: str,
    headers: dict[str, str],
    status: int,
    code: str | None,
) -> None:
    async with client_of(make_app(backend, ring())) as client:
        await client.get(path, headers=headers)
    (line,) = access_lines(caplog)
    assert (line["status"], line["model"], line["ttft_ms"]) == (status, None, None)
    assert line["error_code"] == code
    assert "nowhere" not in str(line)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_with_tool_calls_has_their_finish_reason(
    caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    backend = FakeBackend([[TextDelta((1,), text, FinishReason.STOP)]], tool_call_format="hermes")
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with client_of(make_app(backend)) as client:
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
async def test_a_line_names_the_route_and_not_the_clients_path(
    backend: FakeBackend,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    route: str | None,
) -> None:
    async with client_of(make_app(backend)) as client:
        await client.request(method, path, json={"prompt": "secret"})
    (line,) = access_lines(caplog)
    assert line["route"] == route
    assert line["model"] == ("m" if path == "/tokenize" else None)
    assert "secret" not in str(line)


async def test_a_bug_of_ours_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend()
    backend.refusal = RuntimeError("a bug")
    async with client_of(make_app(backend)) as client:
        await client.ask(CHAT, question(), 500)
    (line,) = access_lines(caplog)
    assert (line["status"], line["error_code"]) == (500, "internal_error")


async def test_records_are_kept_when_lines_are_off(caplog: pytest.LogCaptureFixture) -> None:
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
    scope = {"type": "http", "method": "GET", "path": "/", "state": {"request_id": "x"}}
    await middleware(scope, receive, send)
    assert seen == [0.5]
    assert access_lines(caplog) == []
    assert current_record() is None
