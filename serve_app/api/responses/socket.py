"""One WebSocket of `/v1/responses`: frames in, the events of responses out.

A frame `response.create` holds the body of a POST, which the application answers as it answers
HTTP; each event of that stream goes out as one frame. Frames are answered one after the other. A
turn that fails is told as a frame `error`, and the connection stays open. `previous_response_id`
names the connection's last response, whose input and output stand in front of the new input;
`serve_app.api.responses.history` keeps them. Another id is left to the POST where responses are
stored; the connection then keeps nothing of that turn, since it has not seen all of it.

Source: https://developers.openai.com/api/docs/guides/websocket-mode
"""

import asyncio
import json
import logging
import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from starlette.status import (
    WS_1008_POLICY_VIOLATION,
    WS_1011_INTERNAL_ERROR,
    WS_1012_SERVICE_RESTART,
)
from starlette.types import Message, Receive, Send

from deployments.contract.errors import (
    InvalidRequestError,
    PreviousResponseError,
    RaystreamError,
    SocketAgeError,
)
from serve_app.api.responses.history import Items
from serve_app.api.responses.sockets import Sockets
from serve_app.config import LimitsConfig
from serve_app.http.errors import error_response
from serve_app.http.exchange import Exchange
from serve_app.http.json_route import decode_json
from serve_app.http.request_id import REQUEST_ID_HEADER

logger = logging.getLogger("ray.serve")

CREATE: Final = "response.create"
NOTICES: Final = frozenset({"response.processed"})
"""Frames of clients that want no answer."""

ENDED: Final = frozenset({"response.completed", "response.incomplete"})
FAILED: Final = frozenset({"response.failed", "error"})
WITH_RESPONSE: Final = ENDED | {"response.created", "response.in_progress", "response.failed"}

MAX_WAITING: Final = 16
"""Frames that may wait while one is answered."""

OK: Final = 200
FLOODED: Final = "Too many frames wait. Send the next one when the last answer has ended."
CUT: Final = "The answer ended before it was finished."
STOPPING: Final = "The server is about to stop. Connect again."


class Ask(Protocol):
    """Asks the application, as one POST of this connection's client."""

    async def __call__(
        self, body: bytes, request_id: str, *, generates: bool, receive: Receive, send: Send
    ) -> None:
        """Answer a body; `receive` and `send` are those of ASGI's HTTP, after the body."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """What a frame asks for.

    Attributes:
        body: The body of the POST.
        items: All items of the conversation; None if those before its input are only in the store.
        previous: The id of the response that it continues.
        generates: False only lets the connection keep the input.
    """

    body: dict[str, Any]
    items: Items | None
    previous: str | None
    generates: bool


class ResponseSocket:
    """One connection, from the accepted handshake on."""

    def __init__(
        self, receive: Receive, send: Send, ask: Ask, sockets: Sockets, limits: LimitsConfig
    ) -> None:
        """Start without a response.

        Args:
            receive: The connection's, in ASGI.
            send: The connection's, in ASGI.
            ask: Asks the application.
            sockets: All connections.
            limits: The bounds of each body.
        """
        self.left = asyncio.Event()
        self._receive = receive
        self._send_message = send
        self._ask = ask
        self._sockets = sockets
        self._limits = limits
        self._waiting: deque[str | bytes] = deque()
        self._num_bytes = 0  # of what waits
        self._changed = asyncio.Event()
        self._is_aged = False
        self._is_closed = False

    async def run(self) -> None:
        """Answer frames until the client leaves, or the connection has to end."""
        reading = asyncio.ensure_future(self._read())
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._sockets.max_age_s, self._age)
        try:
            with self._sockets.watched(self._changed.set):
                while (frame := await self._next_frame()) is not None:
                    await self._take(frame)
        finally:
            timer.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self._sockets.histories.forget(self)

    def _age(self) -> None:
        self._is_aged = True
        self._changed.set()

    def _leave(self) -> None:
        self.left.set()
        self._changed.set()

    async def _read(self) -> None:
        """Read all the time, so that a client that leaves is noticed while it is answered."""
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                self._leave()
                return
            frame = message.get("text")
            if frame is None:
                frame = message["bytes"]
            self._waiting.append(frame)
            self._num_bytes += len(frame)
            is_heavy = len(self._waiting) > 1 and self._num_bytes > self._limits.max_body_bytes
            if is_heavy or len(self._waiting) > MAX_WAITING:
                await self._close(WS_1008_POLICY_VIOLATION, FLOODED)
                return
            self._changed.set()

    async def _next_frame(self) -> str | bytes | None:
        """Return the next frame; None once the connection has ended."""
        while not self.left.is_set():
            if self._sockets.is_draining:
                await self._close(WS_1012_SERVICE_RESTART, STOPPING)
            elif self._is_aged:
                await self.tell(
                    SocketAgeError(
                        f"The connection has been open for {self._sockets.max_age_s:g} s, the most "
                        "that it may (limits.max_socket_s). Connect again to continue."
                    )
                )
                await self._close(WS_1012_SERVICE_RESTART, "")
            elif self._waiting:
                frame = self._waiting.popleft()
                self._num_bytes -= len(frame)
                return frame
            else:
                self._changed.clear()
                await self._changed.wait()
        return None

    async def _take(self, frame: str | bytes) -> None:
        try:
            turn = self._turn(frame)
        except RaystreamError as error:
            await self.tell(error)
            return
        if turn is None:
            return
        request_id = secrets.token_hex(16)
        body = json.dumps(turn.body, separators=(",", ":")).encode()
        answer = _Answer(self, turn, request_id, body)
        try:
            await self._ask(
                body,
                request_id,
                generates=turn.generates,
                receive=answer.exchange.receive,
                send=answer.send,
            )
        except Exception:  # the application has answered with a 500
            if answer.exchange.status is None:
                raise
            logger.exception("the server has failed at %s", request_id)
        if not self.left.is_set():
            await answer.finish()

    def _turn(self, frame: str | bytes) -> Turn | None:
        """Return what a frame asks for; None if it asks for nothing.

        Raises:
            InvalidRequestError: It can't be answered.
        """
        if isinstance(frame, bytes):
            raise InvalidRequestError("The frame is binary. Send JSON in a text frame.")
        body = decode_json(frame.encode(), self._limits.max_json_depth)
        kind = body.pop("type", None) if isinstance(body, dict) else None
        if isinstance(kind, str) and kind in NOTICES:
            return None
        if kind != CREATE:
            raise InvalidRequestError(
                f"A frame is a JSON object of type {CREATE!r}; no other is answered here.", "type"
            )
        generates = body.pop("generate", None)
        if not isinstance(generates, bool | None):
            raise InvalidRequestError("Send true or false, or leave it out.", "generate")
        return self._begun(body, generates is not False)

    def _begun(self, body: dict[str, Any], generates: bool) -> Turn:
        previous = body.pop("previous_response_id", None)
        given = _items(body.get("input"))
        history = self._history(previous)
        body["stream"] = generates
        if history is None:
            body["previous_response_id"] = previous
            return Turn(body, None, previous, generates)
        items = [*history, *(given or ())]
        if given is not None:
            body["input"] = items
        if not (generates or items):
            # What comes later may be all of the input, but a POST needs some.
            body["input"] = " "
        return Turn(body, items, previous, generates)

    def _history(self, previous: Any) -> Items | None:
        """Return the conversation up to a response; None if only the store can have it.

        Raises:
            PreviousResponseError: The connection does not keep it.
        """
        if previous is None:
            return []
        found = self._sockets.histories.find(self, previous) if isinstance(previous, str) else None
        if found is None and not self._sockets.stores_responses:
            raise PreviousResponseError(
                "The connection keeps only its last response, and this is not its id. Send the "
                "whole conversation, without previous_response_id.",
                "previous_response_id",
            )
        return found

    def keep(self, turn: Turn, response: Mapping[str, Any]) -> None:
        """Keep a response that has ended, for the turn that continues it."""
        if turn.items is None:
            self._sockets.histories.forget(self)
            return
        items = [*turn.items, *response["output"]]
        self._sockets.histories.keep(self, response["id"], items)

    async def send(self, event: str) -> None:
        """Send an event, given as JSON, unless the client has left."""
        if self._is_closed or self.left.is_set():
            return
        try:
            await self._send_message({"type": "websocket.send", "text": event})
        except OSError:  # uvicorn's, when the client has gone
            self._leave()

    async def tell(self, error: RaystreamError) -> None:
        """Send an error that no answer of the application tells of."""
        answer = error_response(error)
        await self.send(_error_event(answer.status_code, answer.headers, bytes(answer.body)))

    async def _close(self, code: int, reason: str) -> None:
        if not (self._is_closed or self.left.is_set()):
            self._is_closed = True
            with suppress(OSError):  # uvicorn's, when the client has gone
                await self._send_message(
                    {"type": "websocket.close", "code": code, "reason": reason}
                )
        self._leave()

    async def cut(self) -> None:
        """Close the connection, so that no client waits for the rest of an answer."""
        await self._close(WS_1011_INTERNAL_ERROR, CUT)


class _Answer:
    """The application's answer to one turn: events are sent on as they come."""

    def __init__(self, socket: ResponseSocket, turn: Turn, request_id: str, body: bytes) -> None:
        self._socket = socket
        self._turn = turn
        self._request_id = request_id
        self.exchange = Exchange(body, socket.left)
        self._events = _Events()
        self._has_ended = False

    async def send(self, message: Message) -> None:
        if self.exchange.status == OK and self._turn.generates:
            for kind, event in self._events.feed(message.get("body", b"")):
                await self._send_event(kind, event)
        else:
            await self.exchange.send(message)

    async def _send_event(self, kind: str, event: str) -> None:
        self._has_ended |= kind in ENDED or kind in FAILED
        if kind in ENDED or (kind in WITH_RESPONSE and self._turn.previous is not None):
            told = json.loads(event)
            if kind in ENDED:
                self._socket.keep(self._turn, told["response"])
            told["response"]["previous_response_id"] = self._turn.previous
            event = _encoded(told)
        elif kind == "error":
            # Its answer had begun to wait for the model before it failed.
            event = _encoded({"type": "error", "status": 500, **json.loads(event)})
        await self._socket.send(event)

    async def finish(self) -> None:
        """Send what is not sent yet; the answer has ended."""
        status, body = self.exchange.status, self.exchange.body
        if status != OK:
            # Serve puts the id onto answers of HTTP only.
            headers = {**self.exchange.headers, REQUEST_ID_HEADER.lower(): self._request_id}
            await self._socket.send(_error_event(status or 500, headers, body))
        elif not self._turn.generates:
            await self._finish_warm_up(json.loads(body))
        elif not self._has_ended:
            await self._socket.cut()

    async def _finish_warm_up(self, response: dict[str, Any]) -> None:
        response["previous_response_id"] = self._turn.previous
        self._socket.keep(self._turn, response)
        begun = {**response, "status": "in_progress", "usage": None}
        for number, (kind, told) in enumerate(
            (("response.created", begun), ("response.completed", response))
        ):
            event = {"type": kind, "sequence_number": number, "response": told}
            await self._socket.send(_encoded(event))


class _Events:
    """Takes apart the events that `serve_app.streaming.sse` has framed, each with one line of data.

    Comments and pings are dropped: a WebSocket has pings of its own.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._kind = "error"  # the only event without a name

    def feed(self, piece: bytes) -> Iterator[tuple[str, str]]:
        """Yield the type and the JSON of each event that a piece completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b": ")
            if name == b"event":
                self._kind = value.decode()
            elif name == b"data":
                yield self._kind, value.decode()
                self._kind = "error"


def _items(given: Any) -> Items | None:
    """Return a body's input as items; None if it is neither a text nor a list."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given if isinstance(given, list) else None


def _error_event(status: int, headers: Mapping[str, str], body: bytes) -> str:
    """Return an error of HTTP as an event: with its status, its body, and what guides retries."""
    told = {name: value for name, value in headers.items() if not name.startswith("content-")}
    return _encoded({"type": "error", "status": status, **json.loads(body), "headers": told})


def _encoded(event: Mapping[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False)
