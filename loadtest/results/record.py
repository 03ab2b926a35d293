"""The records of a run: one per request, and one per level of its sweep.

The sending side writes them; the analysis reads nothing else. All times are seconds of one
monotonic clock from the start of the run, taken when bytes are read from the socket and before they
are parsed.
"""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class ErrorKind(StrEnum):
    """Why a request did not succeed."""

    CONNECT = "connect"
    HTTP_4XX = "http_4xx"
    HTTP_429 = "http_429"
    HTTP_5XX = "http_5xx"
    TIMEOUT_FIRST = "timeout_first"
    TIMEOUT_STALL = "timeout_stall"
    TIMEOUT_TOTAL = "timeout_total"
    SSE_ERROR = "sse_error"
    MALFORMED = "malformed"
    TRUNCATED = "truncated"
    EMPTY = "empty"
    CANCELLED = "cancelled"
    """Ended by the tool itself, as when it is stopped: neither a success nor a server error."""


class TokenSource(StrEnum):
    """The source of a request's output token count."""

    USAGE = "usage"
    EVENTS = "events"
    CHUNKS = "chunks"


class RequestRecord(BaseModel):
    """One request and its outcome.

    Attributes:
        level: The index of its `LevelRecord`.
        index: The request's number within the level, in sending order.
        queue: The queue that sent it; None in an open loop.
        is_warmup: Whether the request is left out of the figures.
        question: The index of its question in the data file.
        scheduled_s: When the request was due; `sent_s` in a closed loop.
        sent_s: When it was sent.
        headers_s: When the response headers arrived.
        content_s: When each content event arrived, in order.
        content_tokens: The tokens credited to each content event; their sum is `output_tokens`.
        content_chars: The characters of each content event.
        ended_s: When the stream ended, or the request failed.
        error: None for a success.
        error_message: The message from the server or the socket, in one line.
        http_status: None if there was no response.
        finish_reason: As the server sent it.
        prompt_tokens: The server's count; None if it sends none.
        cached_tokens: The prompt tokens that the server took from its cache.
        output_tokens: The answer's tokens, counted as `token_source` says.
        received_bytes: The size of the response body.
        oddities: What the answer had besides its API, and was read past; each once, in words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: int
    index: int
    queue: int | None
    is_warmup: bool = False
    question: int
    scheduled_s: float
    sent_s: float
    headers_s: float | None = None
    content_s: tuple[float, ...] = ()
    content_tokens: tuple[int, ...] = ()
    content_chars: tuple[int, ...] = ()
    ended_s: float
    error: ErrorKind | None = None
    error_message: str | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    token_source: TokenSource = TokenSource.CHUNKS
    received_bytes: int = 0
    oddities: tuple[str, ...] = ()


class LevelRecord(BaseModel):
    """One level of a sweep, run once.

    Attributes:
        index: The level's number in the run.
        repeat: Which repetition of the sweep it belongs to, from 0.
        num_queues: Users that each send one request after another; None in an open loop.
        rate_per_s: Requests scheduled per second; None in a closed loop.
        started_s: When the level's first request could be sent.
        warm_s: When warm-up and ramp ended.
        deadline_s: When sending stops, if the level is limited by duration; else None.
        ended_s: When the last request ended.
        lag_ms: How late the tool's own event loop woke, sampled throughout.
        cpu_share: The tool's CPU time per second of the level; 1 is one core.
        num_unsent: Requests of an open loop that were due before the deadline and never sent, since
            `max_inflight` requests were in flight.
        was_stopped: Whether a signal ended the level early.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    repeat: int = 0
    num_queues: int | None
    rate_per_s: float | None = None
    started_s: float
    warm_s: float
    deadline_s: float | None = None
    ended_s: float
    lag_ms: tuple[float, ...] = ()
    cpu_share: float = 0.0
    num_unsent: int = 0
    was_stopped: bool = False
