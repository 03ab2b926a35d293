"""The bytes of Server-Sent Events.

Owns the framing and nothing else: who sends the events, and when, is `event_stream`'s. Payloads are
JSON, so that no newline of a model's text can ever be taken for the end of an event.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import to_json

EVENT_STREAM_HEADERS: Final[Mapping[str, str]] = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    # nginx would else collect the events and pass them on in blocks.
    "X-Accel-Buffering": "no",
}

_LINE_END = re.compile(r"\r\n|\r|\n")


def encode_event(data: str) -> bytes:
    r"""Frame any text as one event: a `data:` line for each of its lines, then an empty line.

    The format knows one line end, so a client reads `\r\n` and `\r` in the text as `\n`.
    """
    lines = _LINE_END.split(data)
    return ("".join(f"data: {line}\n" for line in lines) + "\n").encode()


def encode_json(payload: Mapping[str, Any]) -> bytes:
    """Frame a payload as one event with one line of JSON; NaN and infinities become null."""
    return b"data: %b\n\n" % to_json(payload, inf_nan_mode="null")


def encode_comment(text: str) -> bytes:
    """Frame a text as a comment, which clients skip."""
    return ("".join(f": {line}\n" for line in _LINE_END.split(text)) + "\n").encode()


class LastEvent(bytes):
    """An event behind which nothing comes: the stream's end is sent together with it.

    Clients close the connection when they have read it, and ask for the next thing at once.
    """


DONE: Final = LastEvent(encode_event("[DONE]"))
PING: Final = encode_comment("ping")
