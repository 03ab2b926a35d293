"""The frames of a WebSocket of `/v1/responses`: what a client's asks for, and events as frames.

Source: https://developers.openai.com/api/docs/guides/websocket-mode
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from deployments.contract.errors import InvalidRequestError
from serve_app.http.json_route import decode_json

CREATE: Final = "response.create"
NOTICES: Final = frozenset({"response.processed"})
"""Frames of clients that want no answer."""

STREAM_ID: Final = re.compile(r"[\w.-]{1,256}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Frame:
    """What a client's frame asks for.

    Attributes:
        stream_id: The client's name for its stream: frames of one stream are answered one after
            the other, and each event names it. None is a stream, too.
        body: The body of the POST, with the connection's own meaning of `previous_response_id`.
        generates: False only lets the connection keep the input.
    """

    stream_id: str | None
    body: dict[str, Any]
    generates: bool


@dataclass(frozen=True, slots=True)
class Unanswerable:
    """A client's frame that can't be answered.

    Attributes:
        stream_id: See `Frame`; None, too, if the frame does not say.
        error: Why.
    """

    stream_id: str | None
    error: InvalidRequestError


def read_frame(frame: str | bytes, max_depth: int) -> Frame | Unanswerable | None:
    """Return what a frame asks for; None if it asks for nothing.

    Args:
        frame: As the client sent it.
        max_depth: How deep its JSON may be.
    """
    stream_id = None
    try:
        body = _read_body(frame, max_depth)
        if isinstance(body.get("type"), str) and body["type"] in NOTICES:
            return None
        stream_id = _read_stream_id(body)
        if body.pop("type", None) != CREATE:
            raise InvalidRequestError(
                f"A frame is a JSON object of type {CREATE!r}; no other is answered here.", "type"
            )
        generates = body.pop("generate", None)
        if not isinstance(generates, bool | None):
            raise InvalidRequestError("Send true or false, or leave it out.", "generate")
    except InvalidRequestError as error:
        return Unanswerable(stream_id, error)
    return Frame(stream_id, body, generates is not False)


def _read_body(frame: str | bytes, max_depth: int) -> dict[str, Any]:
    if isinstance(frame, bytes):
        raise InvalidRequestError("The frame is binary. Send JSON in a text frame.")
    body = decode_json(frame.encode(), max_depth)
    return body if isinstance(body, dict) else {}


def _read_stream_id(body: dict[str, Any]) -> str | None:
    stream_id = body.pop("stream_id", None)
    if stream_id is None or (isinstance(stream_id, str) and STREAM_ID.fullmatch(stream_id)):
        return stream_id
    raise InvalidRequestError(
        "Send up to 256 letters, digits, underscores, hyphens and dots, or leave it out.",
        "stream_id",
    )


class Events:
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


def error_event(status: int, headers: Mapping[str, str], body: bytes) -> str:
    """Return an error of HTTP as an event: with its status, its body, and what guides retries."""
    told = {name: value for name, value in headers.items() if not name.startswith("content-")}
    return encoded({"type": "error", "status": status, **json.loads(body), "headers": told})


def encoded(event: Mapping[str, Any]) -> str:
    """Return an event as JSON."""
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False)


def of_stream(event: str, stream_id: str | None) -> str:
    """Return an event, given as JSON, with the name of its stream if that has one."""
    return event if stream_id is None else f'{event[:-1]},"stream_id":"{stream_id}"}}'
