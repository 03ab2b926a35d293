"""One request to an ASGI application from within the process, and the answer that comes back."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import Message


class Exchange:
    """The messages of one request: gives the body, and collects the answer.

    Attributes:
        status: The answer's HTTP status; None until it begins.
        headers: The answer's.
    """

    def __init__(self, body: bytes = b"", left: asyncio.Event | None = None) -> None:
        """Set what is sent.

        Args:
            body: The request's.
            left: Set when the client has left; None if nobody can leave.
        """
        self.status: int | None = None
        self.headers = Headers()
        self._unsent: bytes | None = body
        self._left = left or asyncio.Event()
        self._pieces: list[bytes] = []

    async def receive(self) -> Message:
        """Return the body, and then wait until the client leaves."""
        if self._unsent is None:
            await self._left.wait()
            return {"type": "http.disconnect"}
        body, self._unsent = self._unsent, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Take a message of the answer."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], Headers(raw=list(message["headers"]))
        else:
            self._pieces.append(message.get("body", b""))

    @property
    def body(self) -> bytes:
        """What has come of the answer's body."""
        return b"".join(self._pieces)
