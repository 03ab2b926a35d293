"""Reads Server-Sent Events, comments included, from bytes that arrive in pieces of any size.

Comments tell what a stream waits for (`serve_app.http.stream_notices`); other readers drop them.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

import re
from typing import Final, NamedTuple

MAX_EVENT_BYTES: Final = 16 * 2**20
"""The size limit of one event, so that one that never ends does not fill the memory."""

_LINE_END: Final = re.compile(rb"\r\n?|\n")
_BOM: Final = b"\xef\xbb\xbf"


class OversizedEventError(ValueError):
    """An event is longer than MAX_EVENT_BYTES."""


class Event(NamedTuple):
    """The data of an event, its lines joined by newlines."""

    data: str


class Comment(NamedTuple):
    """The text of a comment's line."""

    text: str


class EventReader:
    """Takes bytes as they arrive and returns what they complete.

    An event that the end of the stream cuts off is never returned, as the standard demands.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._is_after_cr = False
        self._is_at_start = True
        self._data: list[str] = []
        self._num_bytes = 0

    def feed(self, piece: bytes) -> list[Event | Comment]:
        """Return the events and comments that a piece completes, in order.

        Raises:
            OversizedEventError: An event is too long; the reader can't be used afterwards.
        """
        if self._is_after_cr and piece:
            # A CR has ended the last line; an LF that follows belongs to the same line end.
            self._is_after_cr, piece = False, piece.removeprefix(b"\n")
        self._is_after_cr |= piece.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        found = [each for line in lines if (each := self._take(line)) is not None]
        if self._num_bytes + len(self._rest) > MAX_EVENT_BYTES:
            raise OversizedEventError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return found

    def _take(self, line: bytes) -> Event | Comment | None:
        if self._is_at_start:
            self._is_at_start, line = False, line.removeprefix(_BOM)
        if not line:
            data, self._data, self._num_bytes = self._data, [], 0
            return Event("\n".join(data)) if data else None
        self._num_bytes += len(line)
        name, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode("utf-8", "replace")
        if name == b"":
            return Comment(text)
        if name == b"data":
            self._data.append(text)
        return None
