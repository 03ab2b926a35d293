"""Enforces a request's three time limits with one timer.

Resetting the timer for every event would cost more than reading the event. Instead it fires at the
earliest time a limit could expire and, if content has arrived since, sleeps again.
"""

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from loadtest.results.record import ErrorKind


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """The time limits of a request, in seconds; None is no limit.

    Attributes:
        total_s: From sending to the end.
        first_token_s: From sending to the first content event.
        stall_s: From one content event to the next, or to the end.
    """

    total_s: float | None = None
    first_token_s: float | None = None
    stall_s: float | None = None


class Watchdog:
    """Ends the block that it guards with a `TimeoutError` when a limit expires.

    Attributes:
        expired: The limit that expired, if any.
    """

    def __init__(self, limits: TimeLimits) -> None:
        self.expired: ErrorKind | None = None
        self._limits = limits
        self._scope = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._started_s = 0.0
        self._content_s: float | None = None

    async def __aenter__(self) -> Self:
        """Start the limits."""
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        await self._scope.__aenter__()
        self._watch()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
        await self._scope.__aexit__(exc_type, exc_value, traceback)

    def content_came(self) -> None:
        """Restart the time to the next content event."""
        is_first = self._content_s is None
        self._content_s = self._loop.time()
        # The stall limit applies from now on and may expire before the timer fires.
        if is_first and self._limits.stall_s is not None:
            self._watch()

    def disarm(self) -> None:
        """Drop all limits, since the answer is complete."""
        self._limits = TimeLimits()
        self._watch()

    def _watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        earliest = min(self._deadlines(), default=None)
        if earliest is None:
            return
        deadline_s, kind = earliest
        if deadline_s > self._loop.time():
            self._timer = self._loop.call_at(deadline_s, self._watch)
        else:
            self.expired = kind
            self._scope.reschedule(self._loop.time())

    def _deadlines(self) -> list[tuple[float, ErrorKind]]:
        limits = self._limits
        deadlines = [(self._started_s, limits.total_s, ErrorKind.TIMEOUT_TOTAL)]
        if self._content_s is None:
            deadlines.append((self._started_s, limits.first_token_s, ErrorKind.TIMEOUT_FIRST))
        else:
            deadlines.append((self._content_s, limits.stall_s, ErrorKind.TIMEOUT_STALL))
        return [(since + limit, kind) for since, limit, kind in deadlines if limit is not None]
