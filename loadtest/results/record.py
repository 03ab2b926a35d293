"""What a run leaves behind: one record per request, one per level of its sweep.

The sending side writes them, the analysing side reads nothing else. All times are seconds of one
monotonic clock, counted from the start of the run; each was stamped when bytes were read from the
socket, before they were parsed.
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
    """Ended by the tool itself, as when it is stopped: neither a success nor the server's error."""


class TokenSource(StrEnum):
    """Where a request's number of output tokens comes from."""

    USAGE = "usage"
    EVENTS = "events"
    TOKENIZER = "tokenizer"
    CHUNKS = "chunks"


class RequestRecord(BaseModel):
    """One attempt.

    Attributes:
        level: The index of its `LevelRecord`.
        index: Its number within the level, in the order of sending.
        queue: The queue that sent it; None in an open loop.
        is_warmup: It does not count.
        question: The index of its question in the data file.
        scheduled_s: When it should have been sent; `sent_s` in a closed loop.
        sent_s: When it was.
        headers_s: When the answer's headers came.
        content_s: When each content event came, in order.
        content_tokens: The tokens credited to each content event; together `output_tokens`.
        content_chars: The characters of each content event.
        ended_s: When the stream ended, or the attempt did.
        error: None for a success.
        error_message: What the server or the socket said, in one line.
        http_status: None if there was no answer.
        finish_reason: As the server gave it.
        prompt_tokens: As the server counted; None if it does not tell.
        cached_tokens: Those of them that the server had from earlier requests.
        output_tokens: By `token_source`.
        received_bytes: Of the answer's body.
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


class LevelRecord(BaseModel):
    """One level of a sweep, once.

    Attributes:
        index: Its number in the run.
        repeat: Which repetition of the sweep it belongs to, from 0.
        num_queues: Users that send one request after the other; None in an open loop.
        rate_per_s: Requests scheduled per second; None in a closed loop.
        started_s: When its first request could be sent.
        warm_s: When warm-up and ramp had ended.
        deadline_s: When nothing more was sent, for a run by duration; None for one by count.
        ended_s: When its last request had ended.
        lag_ms: How late the tool's own event loop woke, sampled all along.
        cpu_share: The tool's CPU time per second of the level; 1 is one core.
        num_unsent: Requests of an open loop that were due before the deadline and never sent,
            because as many as may be were under way all the time.
        was_stopped: A signal ended it early.
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
