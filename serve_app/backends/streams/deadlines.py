"""Time limits for the first token, the next one, and the whole answer.

Wraps a backend, so that every surface keeps the same limits; `api.requests` applies the first-token
limit to the work before that (images, schemas). The first-token and total limits count from the
request's arrival; the stall limit counts from each read of the stream, but not while the stream
waits to go on at another replica (`GenerationStream.waited_until_s`). When a limit is exceeded, the
sequence is aborted and the stream raises: a 504 if no headers were sent yet, else an error event.
"""

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Any, Final, Self, TypeVar

from deployments.contract.errors import (
    DeadlineExceededError,
    FirstTokenTimeoutError,
    StallTimeoutError,
    TotalTimeoutError,
)
from deployments.contract.generation import GenerationRequest, GenerationStream, Request
from deployments.contract.output import TextDelta
from deployments.contract.pooling import PoolingRequest
from serve_app.backends.replicas.backend import AnswerT, Backend, PingRequest
from serve_app.config import LimitsConfig
from serve_app.http.request_record import seconds_since_arrival

T = TypeVar("T")

MESSAGES: Mapping[type[DeadlineExceededError], str] = MappingProxyType(
    {
        FirstTokenTimeoutError: "No token came within {:g} s (limits.first_token_timeout_s). Try "
        "again when less is going on, or send a shorter prompt.",
        StallTimeoutError: "No token came for {:g} s (limits.stall_timeout_s). Try again.",
        TotalTimeoutError: "The answer was not finished within {:g} s (limits.total_timeout_s). "
        "Ask for fewer tokens with max_tokens.",
    }
)

LATE_TEXTS: Final = (
    "The texts were not answered within {:g} s (limits.total_timeout_s). Send fewer of them, or "
    "shorter ones."
)
LATE_POOLER: Final = (
    "The model was not loaded within {:g} s (limits.total_timeout_s). Try again later."
)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in the event loop's time, and the error for missing it.

    Attributes:
        at_s: The time; infinite if there is no limit.
        error: Raised after that time.
        limit_s: The limit that the deadline was computed from.
        message: The error's message, with a placeholder for the limit.
    """

    at_s: float
    error: type[DeadlineExceededError]
    limit_s: float | None
    message: str

    @classmethod
    def after(
        cls,
        start_s: float,
        limit_s: float | None,
        error: type[DeadlineExceededError],
        message: str | None = None,
    ) -> "Deadline":
        """Return the deadline `limit_s` seconds after `start_s`.

        Args:
            start_s: In the event loop's time.
            limit_s: None sets no limit.
            error: Raised after the deadline.
            message: The error's message; None uses the message for generated text.
        """
        at_s = inf if limit_s is None else start_s + limit_s
        return cls(at_s, error, limit_s, message or MESSAGES[error])

    async def hold(self, work: Awaitable[T]) -> T:
        """Wait for the work until the deadline.

        Raises:
            DeadlineExceededError: The work was not done in time, and was cancelled.
        """
        try:
            async with asyncio.timeout_at(self.at_s) as timer:
                return await work
        except TimeoutError:
            if timer.expired():
                raise self.exceeded() from None
            raise

    def exceeded(self) -> DeadlineExceededError:
        """Return the error for a missed deadline."""
        return self.error(self.message.format(self.limit_s))


def first_deadline(limits: LimitsConfig, started_s: float) -> Deadline:
    """Return when a request that started at `started_s` must have its first token."""
    first = Deadline.after(started_s, limits.first_token_timeout_s, FirstTokenTimeoutError)
    return _or_total(first, limits, started_s)


def next_deadline(limits: LimitsConfig, started_s: float, now_s: float) -> Deadline:
    """Return when a request that has tokens must have the next ones."""
    stall = Deadline.after(now_s, limits.stall_timeout_s, StallTimeoutError)
    return _or_total(stall, limits, started_s)


def _or_total(deadline: Deadline, limits: LimitsConfig, started_s: float) -> Deadline:
    total = Deadline.after(started_s, limits.total_timeout_s, TotalTimeoutError)
    return total if total.at_s < deadline.at_s else deadline


class Deadlines:
    """A model that answers in time or raises."""

    def __init__(self, backend: Backend, limits: LimitsConfig, *, generates: bool = True) -> None:
        """Wrap a model.

        Args:
            backend: The model.
            limits: The time limits.
            generates: Whether the model generates; others have only the total limit.
        """
        self._backend = backend
        self._limits = limits
        self._generates = generates

    def send(self, request: Request[AnswerT]) -> Coroutine[Any, Any, AnswerT]:
        """Return the answer; see `Backend.send`.

        Raises:
            DeadlineExceededError: No replica took the request, or answered it, in time; its call
                was cancelled.
            RaystreamError: See `Backend.send`.
        """
        return self._answer(request)

    async def _answer(self, request: Any) -> Any:
        if isinstance(request, PingRequest):
            return await self._backend.send(request)
        started_s = arrival_s()
        answer = await self._deadline(request, started_s).hold(self._backend.send(request))
        if isinstance(request, GenerationRequest):
            return DeadlineStream(answer, self._limits, started_s)
        return answer

    def _deadline(self, request: Request[Any], started_s: float) -> Deadline:
        if self._generates:
            return first_deadline(self._limits, started_s)
        message = LATE_TEXTS if isinstance(request, PoolingRequest) else LATE_POOLER
        limit_s = self._limits.total_timeout_s
        return Deadline.after(started_s, limit_s, TotalTimeoutError, message)


class DeadlineStream:
    """A stream whose deltas come in time, or that ends with an error.

    One timer watches the stream. It is set for the earliest time at which the current read, or the
    next one, could be late. So there is no timer for each of the many messages.
    """

    def __init__(self, stream: GenerationStream, limits: LimitsConfig, started_s: float) -> None:
        """Take over an accepted stream.

        Args:
            stream: The stream.
            limits: The time limits.
            started_s: When the request arrived, in the event loop's time.
        """
        self.accepted = stream.accepted
        self._stream = stream
        self._deltas = aiter(stream)
        self._has_tokens = False
        self._limits = limits
        self._started_s = started_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.Task[Any] | None = None
        self._asked_s = started_s
        self._missed: Deadline | None = None

    @property
    def waited_until_s(self) -> float:
        """When it last stopped waiting to go on elsewhere; see `GenerationStream`."""
        return self._stream.waited_until_s

    def __aiter__(self) -> Self:
        """Return itself: a stream is read once."""
        return self

    async def __anext__(self) -> list[TextDelta]:
        """Return the deltas that have become ready since the last call.

        Raises:
            DeadlineExceededError: They did not come in time; the sequence is aborted.
            RaystreamError: See `GenerationStream.__aiter__`.
        """
        reader = self._reader = asyncio.current_task(self._loop)
        # Counts from now, not from the last token: a slow reader is not a stall.
        self._asked_s = self._loop.time()
        if self._timer is None:
            self._set_timer()
        try:
            deltas = await anext(self._deltas)
        except asyncio.CancelledError:
            assert reader is not None, "only a task can be cancelled"
            # Another caller may have cancelled the reader too.
            if self._missed is None or reader.uncancel() > 0:
                raise
            await self.aclose()
            raise self._missed.exceeded() from None
        finally:
            self._reader = None
        if not self._has_tokens:
            self._has_tokens = True
            self._stop_timer()
        return deltas

    async def aclose(self) -> None:
        """Abort the sequence unless it has ended; closing twice is harmless."""
        self._stop_timer()
        await self._stream.aclose()

    def _set_timer(self) -> None:
        due = self._deadline()
        if due.limit_s is not None:
            self._timer = self._loop.call_at(due.at_s, self._look)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Cancel the current read if it is late; else set the timer again."""
        self._timer = None
        if self._reader is None:
            return  # the next read sets it
        due = self._deadline()
        if due.at_s > self._loop.time():
            self._set_timer()
            return
        self._missed = due
        self._reader.cancel()

    def _deadline(self) -> Deadline:
        """Return the deadline of the current read, or of the next one."""
        if not self._has_tokens:
            return first_deadline(self._limits, self._started_s)
        since_s = max(self._asked_s, self._stream.waited_until_s)
        return next_deadline(self._limits, self._started_s, since_s)


def arrival_s() -> float:
    """Return when this task's request arrived, in the event loop's time."""
    return asyncio.get_running_loop().time() - seconds_since_arrival()
