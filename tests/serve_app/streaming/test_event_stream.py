import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message, Receive, Scope, Send

from serve_app.http.request_record import CURRENT_RECORD, RequestRecord
from serve_app.http.stream_notices import Notice
from serve_app.streaming.event_stream import EventStreamResponse
from serve_app.streaming.sse import DONE, PING, LastEvent, encode_event
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fakes import FakeClock


class Source:
    def __init__(self) -> None:
        self.is_closed = False
        self.release = asyncio.Event()

    async def aclose(self) -> None:
        self.is_closed = True

    async def events(self) -> AsyncGenerator[bytes, None]:
        yield encode_event("one")
        await self.release.wait()
        yield DONE


ACCEPT = {"Accept": "text/event-stream"}


def call(source: Source, clock: FakeClock, spec_version: str = "2.3") -> AsgiCall:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        response = EventStreamResponse(source.events(), source, sleep=clock.sleep)
        await response(scope, receive, send)

    return AsgiCall(app, "/", None, spec_version, ACCEPT)


async def test_headers_declare_an_event_stream_without_caching_or_buffering() -> None:
    source = Source()
    source.release.set()
    async with call(source, FakeClock()) as client:
        await client.end()
    headers = dict(client.sent[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"
    assert client.body == encode_event("one") + DONE
    assert source.is_closed


async def test_each_event_is_sent_before_the_next_is_requested() -> None:
    source = Source()
    async with call(source, FakeClock()) as client:
        await client.wait_until(lambda: client.body == encode_event("one"))
        assert not source.is_closed
        source.release.set()
        await client.end()
    assert client.body.endswith(DONE)


@pytest.mark.parametrize("last", [DONE, LastEvent(b"data: {}\n\n"), encode_event("two")])
async def test_the_last_event_ends_the_body(last: bytes) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield encode_event("one")
        yield last

    response = EventStreamResponse(events(), Source(), sleep=FakeClock().sleep)
    async with AsgiCall(response, "/", None) as client:
        await client.end()
    sent = [(message["body"], message["more_body"]) for message in client.sent[1:]]
    ends = [(last, False)] if isinstance(last, LastEvent) else [(last, True), (b"", False)]
    assert sent == [(encode_event("one"), True), *ends]


async def test_a_quiet_stream_gets_pings_and_loses_no_event() -> None:
    source, clock = Source(), FakeClock()
    async with call(source, clock) as client:
        await client.wait_until(lambda: client.body == encode_event("one"))
        clock.wake.release()
        await client.wait_until(lambda: client.body == encode_event("one") + PING)
        clock.wake.release()
        await client.wait_until(lambda: client.body == encode_event("one") + PING + PING)
        source.release.set()
        await client.end()
    assert client.body == encode_event("one") + PING + PING + DONE
    assert set(clock.slept_s) == {15.0}


@pytest.mark.parametrize("spec_version", ["2.0", "2.3", "2.4", "3.0"])
async def test_a_disconnect_closes_the_source_under_every_version_of_asgi(
    spec_version: str,
) -> None:
    source = Source()
    async with call(source, FakeClock(), spec_version) as client:
        await client.wait_until(lambda: client.body == encode_event("one"))
        client.leave()
        await client.end()
    assert source.is_closed
    assert b"[DONE]" not in client.body


async def test_a_disconnect_before_the_first_event_closes_the_source() -> None:
    source = Source()
    async with call(source, FakeClock()) as client:
        client.leave()
        await client.end()
    assert source.is_closed


async def test_a_cancelled_response_closes_the_source() -> None:
    source = Source()
    async with call(source, FakeClock()) as client:
        await client.wait_until(lambda: client.body == encode_event("one"))
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.end()
    assert source.is_closed


async def test_an_error_in_the_events_is_raised_and_closes_the_source() -> None:
    source = Source()

    async def events() -> AsyncGenerator[bytes, None]:
        yield encode_event("one")
        raise ZeroDivisionError

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await EventStreamResponse(events(), source, sleep=FakeClock().sleep)(scope, receive, send)

    async with AsgiCall(app, "/", None) as client:
        with pytest.raises(ZeroDivisionError):
            await client.end()
    assert source.is_closed


async def test_a_failed_write_closes_the_source() -> None:
    source = Source()
    response = EventStreamResponse(source.events(), source, sleep=FakeClock().sleep)

    async def send(message: Message) -> None:
        raise OSError

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(OSError):  # noqa: PT011 - the class is all there is to it
        await response({"type": "http", "headers": []}, receive, send)
    assert source.is_closed


async def test_notices_are_sent_as_comments_while_the_stream_is_silent() -> None:
    record = RequestRecord("r", "POST", lambda: 0.0, 0.0)
    goes_on = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        record.on_notice(Notice.WAITING)
        record.on_notice(Notice.MOVED)
        await goes_on.wait()
        yield DONE

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        CURRENT_RECORD.set(record)
        await receive()
        await EventStreamResponse(events(), Source())(scope, receive, send)

    async with AsgiCall(app, "/", None) as call:
        await call.wait_until(lambda: b": waiting\n: moved\n" in call.body)
        goes_on.set()
        await call.end()
    assert call.body == b": waiting\n: moved\n" + DONE
    record.on_notice(Notice.MOVED)  # a notice after the end goes nowhere
