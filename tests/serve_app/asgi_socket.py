"""A WebSocket on bare ASGI: a test sees each message, and can leave at any point."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Self

from starlette.types import ASGIApp, Message

DEADLINE_S = 30
RESPONSES = "/v1/responses"
LAST = ("response.completed", "response.incomplete", "response.failed", "error")


class AsgiSocket:
    def __init__(
        self,
        app: ASGIApp,
        path: str = RESPONSES,
        headers: Mapping[str, str] | None = None,
        extensions: tuple[str, ...] = ("websocket.http.response",),
    ) -> None:
        self._app = app
        told = {"host": "test", "upgrade": "websocket", **(headers or {})}
        self._scope = {
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "scheme": "ws",
            "path": path,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in told.items()],
            "subprotocols": [],
            "extensions": {name: {} for name in extensions},
        }
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "websocket.connect"})
        self._changed = asyncio.Condition()
        self._num_read = 0
        self.held: asyncio.Event | None = None  # what is sent waits for it
        self.gone = False  # what is sent finds no client
        self.sent: list[Message] = []

    async def __aenter__(self) -> Self:
        self.task = asyncio.ensure_future(self._app(self._scope, self._incoming.get, self._send))
        await self.wait_until(lambda: self.sent != [])
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _send(self, message: Message) -> None:
        if self.gone:
            raise OSError("the client has gone")
        async with self._changed:
            self.sent.append(message)
            self._changed.notify_all()
        if self.held is not None:
            await self.held.wait()

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(holds)

    async def end(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.shield(self.task)

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "websocket.disconnect", "code": 1001})

    def put(self, frame: str | bytes) -> None:
        kind = "text" if isinstance(frame, str) else "bytes"
        self._incoming.put_nowait({"type": "websocket.receive", kind: frame})

    def create(self, **fields: Any) -> None:
        self.put(json.dumps({"type": "response.create", "model": "m", **fields}))

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(each["text"]) for each in self.sent if each["type"] == "websocket.send"]

    async def turn(self) -> list[dict[str, Any]]:
        """Return the events of the next turn."""
        begun = self._num_read

        def has_ended() -> bool:
            return any(event["type"] in LAST for event in self.events[begun:])

        await self.wait_until(has_ended)
        events = self.events[begun:]
        last = next(at for at, event in enumerate(events) if event["type"] in LAST)
        self._num_read += last + 1
        return events[: last + 1]

    async def ask(self, **fields: Any) -> list[dict[str, Any]]:
        """Send a body, and return the events of its answer."""
        self.create(**fields)
        return await self.turn()

    async def refused(self, **fields: Any) -> dict[str, Any]:
        """Send a body that is refused, and return the event."""
        (event,) = await self.ask(**fields)
        assert event["type"] == "error"
        return event

    @property
    def denial(self) -> tuple[int, dict[str, Any]]:
        """The status and the body of the answer to a handshake that was refused."""
        start, *bodies = self.sent
        assert start["type"] == "websocket.http.response.start"
        return start["status"], json.loads(b"".join(each.get("body", b"") for each in bodies))

    @property
    def close_code(self) -> int | None:
        last = self.sent[-1]
        return last["code"] if last["type"] == "websocket.close" else None
