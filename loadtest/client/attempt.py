"""A request in progress: collects the content of its record."""

from dataclasses import dataclass, field

from loadtest.client.contract import Call, Delta, Usage
from loadtest.client.token_credit import credit
from loadtest.results.record import ErrorKind, RequestRecord


@dataclass(frozen=True, slots=True)
class Task:
    """A request to send.

    Attributes:
        level: The index of the request's level.
        index: The request's number within the level.
        question: The index of its question in the data file.
        call: The content of the request.
        queue: The queue that sends it; None in an open loop.
        scheduled_s: When the request is due; None means as soon as its queue is free.
        is_warmup: Whether the request is left out of the figures.
    """

    level: int
    index: int
    question: int
    call: Call
    queue: int | None = None
    scheduled_s: float | None = None
    is_warmup: bool = False


@dataclass(slots=True)
class Attempt:
    """The state of a task that was sent.

    Attributes:
        task: The request.
        sent_s: When it was sent.
        headers_s: When the response headers arrived.
        http_status: None before the headers.
        is_complete: Whether the server has marked the answer as complete.
        error: The first error; later ones don't replace it.
    """

    task: Task
    sent_s: float
    headers_s: float | None = None
    http_status: int | None = None
    is_complete: bool = False
    error: ErrorKind | None = None
    error_message: str | None = None
    received_bytes: int = 0
    content_s: list[float] = field(default_factory=list)
    _chars: list[int] = field(default_factory=list)
    _so_far: list[int | None] = field(default_factory=list)
    _counts: list[int | None] = field(default_factory=list)
    _num_uncredited: int = 0
    _usage: Usage | None = None
    _finish_reason: str | None = None
    _oddities: list[str] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float | None:
        """The time from sending to the first content event; None before it."""
        return (self.content_s[0] - self.sent_s) * 1000 if self.content_s else None

    @property
    def num_last_tokens(self) -> int | None:
        """The last content event's tokens; None if the server did not send them with it."""
        return self._counts[-1] if self._counts else None

    def take(self, delta: Delta, time_s: float) -> None:
        """Add an event that was read at this time."""
        self._usage = delta.usage or self._usage
        self._finish_reason = delta.finish_reason or self._finish_reason
        if delta.oddity is not None and delta.oddity not in self._oddities:
            self._oddities.append(delta.oddity)
        if delta.is_done or delta.finish_reason is not None:
            self.is_complete = True
        if delta.error is not None:
            self.fail(ErrorKind.SSE_ERROR, delta.error)
        if delta.text:
            self._take_content(delta, time_s)
        elif delta.num_tokens:
            self._take_tokens_without_text(delta.num_tokens)

    def _take_content(self, delta: Delta, time_s: float) -> None:
        self.content_s.append(time_s)
        self._chars.append(len(delta.text))
        self._so_far.append(None if delta.usage is None else delta.usage.output_tokens)
        count = delta.num_tokens
        self._counts.append(None if count is None else count + self._num_uncredited)
        self._num_uncredited = 0

    def _take_tokens_without_text(self, num_tokens: int) -> None:
        """Credit the tokens to the previous content event, or else to the next one."""
        if self._counts and self._counts[-1] is not None:
            self._counts[-1] += num_tokens
        else:
            self._num_uncredited += num_tokens

    def fail(self, kind: ErrorKind, message: str) -> None:
        """Keep this error unless there is an earlier one."""
        if self.error is None:
            self.error, self.error_message = kind, message

    def record(self, ended_s: float) -> RequestRecord:
        """Return the record of the ended request."""
        usage = self._usage or Usage(None, None, None)
        credited = credit(usage.output_tokens, self._so_far, self._counts)
        task = self.task
        return RequestRecord(
            level=task.level,
            index=task.index,
            queue=task.queue,
            is_warmup=task.is_warmup,
            question=task.question,
            scheduled_s=self.sent_s if task.scheduled_s is None else task.scheduled_s,
            sent_s=self.sent_s,
            headers_s=self.headers_s,
            content_s=tuple(self.content_s),
            content_tokens=credited.tokens,
            content_chars=tuple(self._chars),
            ended_s=ended_s,
            error=self.error,
            error_message=self.error_message,
            http_status=self.http_status,
            finish_reason=self._finish_reason,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=sum(credited.tokens),
            token_source=credited.source,
            received_bytes=self.received_bytes,
            oddities=tuple(self._oddities),
        )
