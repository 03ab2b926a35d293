"""One answer of the mock: its events, their times, and its fault."""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web

from loadtest.mock.script import Behaviour, Fault, Framing
from loadtest.mock.surfaces import Surface

DONE: Final = "[DONE]"
_STATUS_OF: Final = {Fault.HTTP_4XX: 400, Fault.HTTP_429: 429, Fault.HTTP_5XX: 503}
ODD_LINES: Final = ("event: ping", 'data: {"type": "ping"}', "", "data: : ping", "", "data:", "")
_FOREVER_S: Final = 24 * 3600.0


class BrokenOffError(Exception):
    """The connection was broken off on purpose, so no HTTP response can be sent."""


class Pace:
    """Waits until times counted from the request's arrival, so that delays don't add up."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._started_s = time.monotonic()

    async def headers(self) -> None:
        """Wait until the headers are due."""
        await self._until(self._behaviour.headers_ms)

    async def content(self, index: int) -> None:
        """Wait until a content event is due."""
        await self._until(self._content_ms(index))

    async def tail(self, num_events: int) -> None:
        """Wait until the end is due."""
        last_ms = self._content_ms(num_events - 1) if num_events else 0.0
        await self._until(last_ms + self._behaviour.tail_ms)

    def _content_ms(self, index: int) -> float:
        return self._behaviour.first_token_ms + index * self._behaviour.gap_ms

    async def _until(self, after_ms: float) -> None:
        left_s = self._started_s + after_ms / 1000 - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)


async def refuse_or_break(request: web.Request, fault: Fault | None) -> web.Response | None:
    """Return the response of a fault that happens before any stream; None for others.

    Raises:
        BrokenOffError: The fault breaks the connection.
    """
    match fault:
        case Fault.HTTP_4XX | Fault.HTTP_429 | Fault.HTTP_5XX:
            return _error(_STATUS_OF[fault])
        case Fault.WRONG_TYPE:
            return web.Response(text="<html>no stream</html>", content_type="text/html")
        case Fault.CONNECT:
            _transport(request).abort()
        case Fault.NO_HTTP:
            _transport(request).write(b"220 mail.example ESMTP\r\n")
            _transport(request).close()
        case _:
            return None
    raise BrokenOffError


def _error(status: int) -> web.Response:
    error = {"message": f"the mock answers {status}", "type": "mock", "param": None, "code": "mock"}
    headers = {"Retry-After": "0"} if status != _STATUS_OF[Fault.HTTP_4XX] else {}
    return web.json_response({"error": error}, status=status, headers=headers)


def _transport(request: web.Request) -> asyncio.Transport:
    assert isinstance(request.transport, asyncio.Transport)
    return request.transport


class StreamedAnswer:
    """An answer as a stream of events."""

    def __init__(self, request: web.Request, surface: Surface, behaviour: Behaviour) -> None:
        self._request = request
        self._surface = surface
        self._behaviour = behaviour
        self._pace = Pace(behaviour)
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

    async def send(self) -> web.StreamResponse:
        """Send the answer.

        Raises:
            BrokenOffError: A fault has broken the connection.
        """
        await self._pace.headers()
        await self._response.prepare(self._request)
        if self._behaviour.framing is Framing.BOM:
            await self._response.write(b"\xef\xbb\xbf")
        await self._write(self._surface.opening())
        fault = self._behaviour.fault
        num_events = 0 if fault is Fault.EMPTY else self._behaviour.num_events
        for index in range(num_events):
            if fault is not None and index == self._behaviour.fault_after:
                return await self._break(fault)
            await self._pace.content(index)
            await self._write(self._surface.content(self._behaviour, index))
        await self._pace.tail(num_events)
        await self._end(num_events)
        return self._response

    async def _end(self, num_events: int) -> None:
        await self._write(self._surface.finish())
        if self._behaviour.tells_usage:
            num_tokens = num_events * self._behaviour.tokens_per_event
            await self._write(self._usage(num_tokens))
        await self._write(DONE)
        await self._response.write_eof()

    def _usage(self, num_tokens: int) -> Mapping[str, Any] | None:
        usage = self._surface.usage(num_tokens)
        if usage is None or self._behaviour.framing is not Framing.ODD:
            return usage
        return {name: value for name, value in usage.items() if name != "choices"}

    async def _break(self, fault: Fault) -> web.StreamResponse:
        match fault:
            case Fault.TIMEOUT_FIRST | Fault.TIMEOUT_STALL:
                await asyncio.sleep(_FOREVER_S)
            case Fault.TIMEOUT_TOTAL:
                await self._never_end()
            case Fault.SSE_ERROR:
                await self._write({"error": {"message": "the mock gives up", "code": "mock"}})
            case Fault.MALFORMED:
                await self._write("{no json")
            case Fault.WRONG_FRAMING:
                _transport(self._request).write(b"not a length\r\nat all\r\n")
                _transport(self._request).close()
                raise BrokenOffError
            case Fault.RESET:
                _transport(self._request).abort()
                raise BrokenOffError
        await self._response.write_eof()
        return self._response

    async def _never_end(self) -> None:
        index = self._behaviour.fault_after
        while True:
            await self._pace.content(index)
            await self._write(self._surface.content(self._behaviour, index))
            index += 1
            await asyncio.sleep(0)

    async def _write(self, payload: Mapping[str, Any] | str | None) -> None:
        if payload is None:
            return
        event = framed(payload, self._behaviour.framing)
        if self._behaviour.framing is not Framing.BYTES:
            await self._response.write(event)
            return
        for byte in event:
            await self._response.write(bytes([byte]))
            await asyncio.sleep(0)


def framed(payload: Mapping[str, Any] | str, framing: Framing) -> bytes:
    """Return an event's bytes; a text payload is used as the data unchanged."""
    if isinstance(payload, str):
        data = payload
    else:
        data = json.dumps(payload, indent=1 if framing is Framing.MULTILINE else None)
    lines = [f"data: {line}" for line in data.split("\n")]
    if framing is Framing.COMMENTS:
        lines = [": ping", "", "id: 1", "retry: 1000", "event: message", *lines]
    if framing is Framing.ODD:
        lines = [*ODD_LINES, *(f"{line} " for line in lines)]
    line_end = {Framing.CRLF: "\r\n", Framing.CR: "\r"}.get(framing, "\n")
    return "".join(line + line_end for line in [*lines, ""]).encode()
