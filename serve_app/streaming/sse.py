"""The bytes of Server-Sent Events.

This module owns only the framing; `event_stream` sends the events. Payloads are JSON, so that a
newline in a model's text is never taken for the end of an event.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import to_json

EVENT_STREAM: Final = "text/event-stream"
EVENT_STREAM_HEADERS: Final[Mapping[str, str]] = {
    # The format is always UTF-8, but readers that know only `text/` take Latin-1.
    "Content-Type": f"{EVENT_STREAM}; charset=utf-8",
    "Cache-Control": "no-cache",
    # Otherwise nginx buffers events and passes them on in blocks.
    "X-Accel-Buffering": "no",
}

UNICODE_LINE_ENDS: Final = {
    end.encode(): json.dumps(end).strip('"').encode() for end in "\x85\u2028\u2029"
}
"""What JSON and the format allow in a line, though Python's `splitlines` and httpx's `iter_lines`
split there: as UTF-8, and as JSON escapes it.
"""

_LINE_END = re.compile(r"\r\n|\r|\n")


def encode_event(data: str) -> bytes:
    r"""Frame any text as one event: a `data:` line for each of its lines, then an empty line.

    The format has one line end, so a client reads `\r\n` and `\r` in the text as `\n`.
    """
    lines = _LINE_END.split(data)
    return ("".join(f"data: {line}\n" for line in lines) + "\n").encode()


def encode_json(payload: Mapping[str, Any]) -> bytes:
    """Frame a payload as one event with one line of JSON; NaN and infinities become null.

    JSON escapes all other line ends itself. `UNICODE_LINE_ENDS` are escaped here.
    """
    line = to_json(payload, inf_nan_mode="null")
    if not line.isascii():
        for raw, escaped in UNICODE_LINE_ENDS.items():
            line = line.replace(raw, escaped)
    return b"data: %b\n\n" % line


def encode_typed(payload: Mapping[str, Any]) -> bytes:
    """Frame a payload as one event that is named by the payload's `type`."""
    return b"event: %b\n%b" % (payload["type"].encode(), encode_json(payload))


def encode_comment(text: str) -> bytes:
    """Frame a text as a comment, which clients skip.

    No empty line follows, because that ends an event: once a stream has had an `id:`, httpx-sse and
    OpenAI's SDK pass on an event without data, and older SDKs for Go do so in any stream.
    """
    return "".join(f": {line}\n" for line in _LINE_END.split(text)).encode()


class LastEvent(bytes):
    """The final event of a stream. The end of the body is sent together with it.

    Clients close the connection after reading this event, and may send their next request at once.
    """


DONE: Final = LastEvent(encode_event("[DONE]"))
PING: Final = encode_comment("ping")
SILENT_PING: Final = b" \n"
"""A ping that is no comment: a field without a known name, which the standard ignores as well.

Readers that take each line, or each piece, for JSON strip it and find nothing.
"""
