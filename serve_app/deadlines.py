"""How long a client may have to wait: for the first token, for the next one, and for the whole.

Wraps a backend, so that every surface is held to the same limits. When one is exceeded the sequence
is aborted and the stream raises: before the headers that is a 504, behind them an error event.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import TypeVar

from deployments.contract import GenerationRequest, ModelDescription, TextDelta
from deployments.errors import (
    DeadlineExceededError,
    FirstTokenTimeoutError,
    StallTimeoutError,
    TotalTimeoutError,
)
from serve_app.backends import GenerationBackend, GenerationStream
from serve_app.config import LimitsConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in the event loop's time, and what it means to be late."""

    at_s: float
    error: DeadlineExceededError

    async def hold(self, work: Awaitable[T]) -> T:
        """Wait for the work, until the deadline.

        Raises:
            DeadlineExceededError: The work was not done in time, and was cancelled.
        """
        try:
            async with asyncio.timeout_at(self.at_s) as timer:
                return await work
        except TimeoutError:
            if timer.expired():
                raise self.error from None
            raise


def first_deadline(limits: LimitsConfig, started_s: float) -> Deadline:
    """Return when a request that started then must have its first token."""
    seconds = limits.first_token_timeout_s
    message = (
        f"No token came within {seconds} s (first_token_timeout_s). Try again when less is going "
        "on, or send a shorter prompt."
    )
    first = Deadline(_after(started_s, seconds), FirstTokenTimeoutError(message))
    return min(first, _total_deadline(limits, started_s), key=lambda deadline: deadline.at_s)


def next_deadline(limits: LimitsConfig, started_s: float, now_s: float) -> Deadline:
    """Return when a request that has tokens must have more."""
    seconds = limits.stall_timeout_s
    message = f"No token came for {seconds} s (stall_timeout_s). Try again."
    stall = Deadline(_after(now_s, seconds), StallTimeoutError(message))
    return min(stall, _total_deadline(limits, started_s), key=lambda deadline: deadline.at_s)


def _total_deadline(limits: LimitsConfig, started_s: float) -> Deadline:
    seconds = limits.total_timeout_s
    message = (
        f"The answer was not finished within {seconds} s (total_timeout_s). Ask for fewer tokens "
        "with max_tokens."
    )
    return Deadline(_after(started_s, seconds), TotalTimeoutError(message))


def _after(start_s: float, seconds: float | None) -> float:
    return float("inf") if seconds is None else start_s + seconds


class DeadlineBackend:
    """A model that answers in time, or not at all."""

    def __init__(self, backend: GenerationBackend, limits: LimitsConfig) -> None:
        """Keep the model and the limits."""
        self._backend = backend
        self._limits = limits

    async def generate(self, request: GenerationRequest) -> GenerationStream:
        """Open a stream; see `GenerationBackend.generate`.

        Raises:
            DeadlineExceededError: The replica did not take the request in time.
            RaystreamError: See `GenerationBackend.generate`.
        """
        started_s = _now_s()
        deadline = first_deadline(self._limits, started_s)
        stream = await deadline.hold(self._backend.generate(request))
        return DeadlineStream(stream, self._limits, started_s)

    async def describe(self) -> ModelDescription:
        """Return what the model can do; see `GenerationBackend.describe`.

        Raises:
            DeadlineExceededError: No replica had the model loaded in time.
            RaystreamError: See `GenerationBackend.describe`.
        """
        return await first_deadline(self._limits, _now_s()).hold(self._backend.describe())

    async def ping(self) -> None:
        """Exercise a replica's engine; whoever asks knows how long to wait."""
        await self._backend.ping()


class DeadlineStream:
    """A stream that comes in time, or ends with an error."""

    def __init__(self, stream: GenerationStream, limits: LimitsConfig, started_s: float) -> None:
        """Take over an accepted stream.

        Args:
            stream: The stream.
            limits: How long each part of it may take.
            started_s: When the request came, in the event loop's time.
        """
        self.num_prompt_tokens = stream.num_prompt_tokens
        self._stream = stream
        self._limits = limits
        self._started_s = started_s

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        """Iterate over lists of deltas; see `GenerationStream.__aiter__`.

        Raises:
            DeadlineExceededError: They did not come in time; the sequence is aborted.
            RaystreamError: See `GenerationStream.__aiter__`.
        """
        deltas = aiter(self._stream)
        deadline = first_deadline(self._limits, self._started_s)
        while True:
            try:
                yield await deadline.hold(anext(deltas))
            except StopAsyncIteration:
                return
            except DeadlineExceededError:
                await self._stream.aclose()
                raise
            # From here, not from the last: a reader that came late is not to be held against it.
            deadline = next_deadline(self._limits, self._started_s, _now_s())

    async def aclose(self) -> None:
        """Abort the sequence unless it has ended; closing twice is harmless."""
        await self._stream.aclose()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
