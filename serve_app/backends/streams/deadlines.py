"""Time limits for the first token, the next one, and the whole answer.

Wraps backends, so that every surface keeps the same limits; `api.intake` applies the first-token
limit to the work before that (images, schemas). The first-token and total limits count from the
request's arrival; the stall limit counts from each read of the stream. When a limit is exceeded,
the sequence is aborted and the stream raises: a 504 if no headers were sent yet, else an error
event.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Any, Self, TypeVar

from deployments.contract.descriptions import ModelDescription, PoolerDescription
from deployments.contract.errors import (
    DeadlineExceededError,
    FirstTokenTimeoutError,
    StallTimeoutError,
    TotalTimeoutError,
)
from deployments.contract.generation import GenerationRequest, TokenizedPrompt, TokenizeRequest
from deployments.contract.output import TextDelta
from deployments.contract.pooling import PooledText, PoolingRequest
from serve_app.backends.replicas.generation import GenerationBackend, GenerationStream
from serve_app.backends.replicas.pooling import PoolingBackend
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


class DeadlineGenerationBackend:
    """A model that answers in time or raises."""

    def __init__(self, backend: GenerationBackend, limits: LimitsConfig) -> None:
        self._backend = backend
        self._limits = limits

    async def generate(self, request: GenerationRequest) -> GenerationStream:
        """Open a stream; see `GenerationBackend.generate`.

        Raises:
            DeadlineExceededError: The replica did not take the request in time.
            RaystreamError: See `GenerationBackend.generate`.
        """
        started_s = arrival_s()
        deadline = first_deadline(self._limits, started_s)
        stream = await deadline.hold(self._backend.generate(request))
        return DeadlineStream(stream, self._limits, started_s)

    async def describe(self) -> ModelDescription:
        """Return what the model can do; see `GenerationBackend.describe`.

        Raises:
            DeadlineExceededError: No replica had the model loaded in time.
            RaystreamError: See `GenerationBackend.describe`.
        """
        return await first_deadline(self._limits, arrival_s()).hold(self._backend.describe())

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        """Return a prompt's tokens; see `GenerationBackend.tokenize`.

        Raises:
            DeadlineExceededError: The replica did not answer in time.
            RaystreamError: See `GenerationBackend.tokenize`.
        """
        return await first_deadline(self._limits, arrival_s()).hold(self._backend.tokenize(request))

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of tokens; see `GenerationBackend.detokenize`.

        Raises:
            DeadlineExceededError: The replica did not answer in time.
            RaystreamError: See `GenerationBackend.detokenize`.
        """
        deadline = first_deadline(self._limits, arrival_s())
        return await deadline.hold(self._backend.detokenize(token_ids))

    async def ping(self) -> None:
        """Exercise a replica's engine; the caller sets its own time limit."""
        await self._backend.ping()


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
        self.num_prompt_tokens = stream.num_prompt_tokens
        self.reasoning = stream.reasoning
        self.fingerprint = stream.fingerprint
        self.prompt_digest = stream.prompt_digest
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
        return next_deadline(self._limits, self._started_s, self._asked_s)


class DeadlinePoolingBackend:
    """A pooler that answers in time or raises."""

    def __init__(self, backend: PoolingBackend, total_timeout_s: float | None) -> None:
        """Wrap a pooler.

        Args:
            backend: The pooler.
            total_timeout_s: Most seconds that an answer may take; None sets no limit.
        """
        self._backend = backend
        self._total_timeout_s = total_timeout_s

    async def pool(self, request: PoolingRequest) -> tuple[PooledText, ...]:
        """Return the row of each text; see `PoolingBackend.pool`.

        Raises:
            TotalTimeoutError: The replica did not answer in time; its call was cancelled.
            RaystreamError: See `PoolingBackend.pool`.
        """
        deadline = self._deadline(
            "The texts were not answered within {:g} s (limits.total_timeout_s). Send fewer of "
            "them, or shorter ones."
        )
        return await deadline.hold(self._backend.pool(request))

    async def describe(self) -> PoolerDescription:
        """Return what the model can do; see `PoolingBackend.describe`.

        Raises:
            TotalTimeoutError: No replica had the model loaded in time.
            RaystreamError: See `PoolingBackend.describe`.
        """
        deadline = self._deadline(
            "The model was not loaded within {:g} s (limits.total_timeout_s). Try again later."
        )
        return await deadline.hold(self._backend.describe())

    async def ping(self) -> None:
        """Exercise a replica; the caller sets its own time limit."""
        await self._backend.ping()

    def _deadline(self, message: str) -> Deadline:
        """Return the deadline for this request's answer, with its message."""
        return Deadline.after(arrival_s(), self._total_timeout_s, TotalTimeoutError, message)


def arrival_s() -> float:
    """Return when this task's request arrived, in the event loop's time."""
    return asyncio.get_running_loop().time() - seconds_since_arrival()
