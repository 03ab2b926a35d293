"""Decodes Server-Sent Events from bytes that arrive in pieces of any size.

This module knows only the format; each API interprets the data. An event is returned with the piece
of bytes that ends it, so the event gets the time at which that piece was read.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

import re
from typing import Final, NamedTuple

_LINE_END: Final = re.compile(rb"\r\n?|\n")
_BOM: Final = b"\xef\xbb\xbf"

MAX_EVENT_BYTES: Final = 64 * 1024 * 1024
"""The size limit of one event, so that an event that never ends does not fill the memory."""


class OversizedEventError(ValueError):
    """An event is longer than allowed."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"an event of more than {max_bytes} bytes")


class ServerSentEvent(NamedTuple):
    """A complete event.

    Attributes:
        data: The data lines, joined by newlines.
        name: The value of the `event` field.
    """

    data: str
    name: str = "message"


class SseDecoder:
    """Takes bytes as they arrive and returns the events that they complete.

    An event cut off by the end of the stream is never returned, as the standard demands. Ids and
    pauses are skipped: a request that broke is not sent again.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest: list[bytes] = []
        self._num_pending = 0
        self._is_first_line = True
        self._is_after_cr = False
        self._data: list[str] = []
        self._name = ""

    def feed(self, piece: bytes) -> list[ServerSentEvent]:
        """Return the events that this piece completes.

        Raises:
            OversizedEventError: An event is too long. The decoder can't be used afterwards.
        """
        events: list[ServerSentEvent] = []
        for line in self._whole_lines(piece):
            if line:
                self._take_field(line)
            elif (event := self._dispatch()) is not None:
                events.append(event)
        is_between_events = not (self._rest or self._data)
        num_before = 0 if events else self._num_pending
        self._num_pending = 0 if is_between_events else num_before + len(piece)
        if self._num_pending > self._max_event_bytes:
            raise OversizedEventError(self._max_event_bytes)
        return events

    def _whole_lines(self, piece: bytes) -> list[bytes]:
        """Return the lines that this piece completes; keep the rest for the next piece."""
        if self._is_after_cr:
            # A CR ended the last line; an LF that follows belongs to the same line end.
            self._is_after_cr = not piece
            piece = piece.removeprefix(b"\n")
        *lines, rest = _LINE_END.split(piece) if b"\r" in piece else piece.split(b"\n")
        self._is_after_cr |= piece.endswith(b"\r")
        if lines:
            lines[0] = b"".join((*self._rest, lines[0]))
            self._rest.clear()
            if self._is_first_line:
                self._is_first_line = False
                lines[0] = lines[0].removeprefix(_BOM)
        if rest:
            self._rest.append(rest)
        return lines

    def _take_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode("utf-8", "replace")
        if name == b"data":
            self._data.append(text)
        elif name == b"event":
            self._name = text

    def _dispatch(self) -> ServerSentEvent | None:
        lines, self._data = self._data, []
        name, self._name = self._name, ""
        if not lines:
            return None
        return ServerSentEvent("\n".join(lines), name or "message")
