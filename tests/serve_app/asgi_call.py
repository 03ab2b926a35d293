"""A client on bare ASGI: a test sees each message, and can disconnect at any point."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Self

from starlette.types import ASGIApp, Message

DEADLINE_S = 30


class AsgiCall:
    def __init__(
        self,
        app: ASGIApp,
        path: str,
        body: Any,
        spec_version: str = "2.3",
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
        more_body: bool = False,
    ) -> None:
        self._app = app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [
                (name.lower().encode(), value.encode())
                for name, value in {"content-type": "application/json", **(headers or {})}.items()
            ],
        }
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        request = {"type": "http.request", "body": json.dumps(body).encode()}
        self._incoming.put_nowait({**request, "more_body": more_body})
        self._changed = asyncio.Condition()
        self.sent: list[Message] = []

    async def __aenter__(self) -> Self:
        self.task = asyncio.ensure_future(self._app(self._scope, self._incoming.get, self._send))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _send(self, message: Message) -> None:
        async with self._changed:
            self.sent.append(message)
            self._changed.notify_all()

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(holds)

    async def end(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.shield(self.task)
