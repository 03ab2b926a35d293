"""The mock's script: how it answers each request, one behaviour after another."""

import json
from collections.abc import Iterator
from enum import StrEnum
from itertools import repeat
from pathlib import Path
from typing import Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class Fault(StrEnum):
    """The ways an answer can fail. Each causes one of the load tester's kinds of error."""

    CONNECT = "connect"
    """The connection is reset before any response."""
    HTTP_4XX = "http_4xx"
    HTTP_429 = "http_429"
    HTTP_5XX = "http_5xx"
    TIMEOUT_FIRST = "timeout_first"
    """Silence after the headers."""
    TIMEOUT_STALL = "timeout_stall"
    """Silence in the middle of the stream."""
    TIMEOUT_TOTAL = "timeout_total"
    """A stream that never ends."""
    SSE_ERROR = "sse_error"
    """An error event in the middle of the stream."""
    MALFORMED = "malformed"
    """An event that is not JSON."""
    WRONG_TYPE = "wrong_type"
    """An HTML page instead of a stream."""
    WRONG_FRAMING = "wrong_framing"
    """HTTP chunks with invalid lengths."""
    NO_HTTP = "no_http"
    """A response in another protocol."""
    TRUNCATED = "truncated"
    """The stream ends too early, with valid framing."""
    RESET = "reset"
    """The connection is reset in the middle of the stream."""
    EMPTY = "empty"
    """A complete answer without text."""


class Framing(StrEnum):
    """The ways to write events; the standard allows all of these, but not each API."""

    LF = "lf"
    CRLF = "crlf"
    CR = "cr"
    COMMENTS = "comments"
    """Comments, ids and pauses between the events."""
    MULTILINE = "multiline"
    """JSON over several data lines."""
    BOM = "bom"
    """A byte order mark at the start."""
    ODD = "odd"
    """Pings as events, comments as data, a `[DONE]` with spaces, and usage without choices."""
    BYTES = "bytes"
    """Each byte in a packet of its own, as far as the network allows."""


class Behaviour(BaseModel):
    """The answer to each of a number of requests.

    Attributes:
        times: The number of requests; None means all that follow.
        headers_ms: Time from the request to the headers.
        first_token_ms: Time from the request to the first content event.
        gap_ms: Time from one content event to the next.
        tail_ms: Time from the last content event to the events that end the stream.
        num_events: Content events per answer.
        tokens_per_event: Tokens per content event.
        tells_usage: Whether usage is sent at the end, if the API has it.
        tells_usage_so_far: Whether usage is sent with each event.
        fault: How the answer fails, if at all.
        fault_after: The number of content events before the fault.
        framing: How events are written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    times: int | None = Field(default=None, ge=1)
    headers_ms: float = Field(default=0.0, ge=0)
    first_token_ms: float = Field(default=0.0, ge=0)
    gap_ms: float = Field(default=0.0, ge=0)
    tail_ms: float = Field(default=0.0, ge=0)
    num_events: int = Field(default=16, ge=0)
    tokens_per_event: int = Field(default=1, ge=1)
    tells_usage: bool = True
    tells_usage_so_far: bool = False
    fault: Fault | None = None
    fault_after: int = Field(default=0, ge=0)
    framing: Framing = Framing.LF


class Script:
    """Gives each request its behaviour; after the last one, starts again."""

    def __init__(self, *behaviours: Behaviour) -> None:
        """Start with the first behaviour; without any, use the defaults for all requests."""
        self._behaviours = behaviours or (Behaviour(),)
        self._upcoming = self._in_order()

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a YAML or JSON file: a list of behaviours.

        Raises:
            OSError: The file can't be read.
            ValueError: The file is not such a list.
        """
        text = path.read_text()
        listed = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        return cls(*TypeAdapter(list[Behaviour]).validate_python(listed))

    def next(self) -> Behaviour:
        """Return the next request's behaviour."""
        return next(self._upcoming)

    def _in_order(self) -> Iterator[Behaviour]:
        while True:
            for behaviour in self._behaviours:
                if behaviour.times is None:
                    yield from repeat(behaviour)
                yield from repeat(behaviour, behaviour.times or 0)
