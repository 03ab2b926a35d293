"""What the mock does with each request: behaviours, one after the other."""

import json
from collections.abc import Iterator
from enum import StrEnum
from itertools import repeat
from pathlib import Path
from typing import Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class Fault(StrEnum):
    """How an answer goes wrong. Each makes one of the load tester's kinds of error."""

    CONNECT = "connect"
    """The connection is reset before anything is answered."""
    HTTP_4XX = "http_4xx"
    HTTP_429 = "http_429"
    HTTP_5XX = "http_5xx"
    TIMEOUT_FIRST = "timeout_first"
    """Silence behind the headers."""
    TIMEOUT_STALL = "timeout_stall"
    """Silence in mid-stream."""
    TIMEOUT_TOTAL = "timeout_total"
    """A stream that never ends."""
    SSE_ERROR = "sse_error"
    """An error event in mid-stream."""
    MALFORMED = "malformed"
    """An event that is no JSON."""
    WRONG_TYPE = "wrong_type"
    """A page of HTML instead of a stream."""
    WRONG_FRAMING = "wrong_framing"
    """HTTP chunks whose lengths are none."""
    NO_HTTP = "no_http"
    """An answer in another protocol."""
    TRUNCATED = "truncated"
    """The stream ends too early, in good order."""
    RESET = "reset"
    """The connection is reset in mid-stream."""
    EMPTY = "empty"
    """A complete answer without a word."""


class Framing(StrEnum):
    """How events are written: all of it is allowed by the standard."""

    LF = "lf"
    CRLF = "crlf"
    CR = "cr"
    COMMENTS = "comments"
    """Comments, ids and pauses between the events."""
    MULTILINE = "multiline"
    """JSON over several data lines."""
    BOM = "bom"
    """A byte order mark in front."""
    BYTES = "bytes"
    """Each byte in a packet of its own, as far as the network lets it."""


class Behaviour(BaseModel):
    """How some requests are answered.

    Attributes:
        times: For how many requests; None means for all that follow.
        headers_ms: From the request to the headers.
        first_token_ms: From the request to the first content event.
        gap_ms: From one content event to the next.
        tail_ms: From the last content event to what ends the stream.
        num_events: Content events of an answer.
        tokens_per_event: As the server counts them.
        tells_usage: Whether the usage comes at the end, where the API has it.
        tells_usage_so_far: Whether it comes with each event.
        fault: What goes wrong, if anything.
        fault_after: The content events before that.
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
    """Hands each request its behaviour; behind the last one it starts again."""

    def __init__(self, *behaviours: Behaviour) -> None:
        """Begin with the first one; without any, all requests are answered by the defaults."""
        self._behaviours = behaviours or (Behaviour(),)
        self._coming = self._in_order()

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a YAML or JSON file: a list of behaviours.

        Raises:
            OSError: It can't be read.
            ValueError: It is no such list.
        """
        text = path.read_text()
        listed = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        return cls(*TypeAdapter(list[Behaviour]).validate_python(listed))

    def next(self) -> Behaviour:
        """Return the next request's behaviour."""
        return next(self._coming)

    def _in_order(self) -> Iterator[Behaviour]:
        while True:
            for behaviour in self._behaviours:
                if behaviour.times is None:
                    yield from repeat(behaviour)
                yield from repeat(behaviour, behaviour.times or 0)
