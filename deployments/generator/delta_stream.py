"""The deltas of one sequence, between the engine's thread and the reader of the stream.

The reader gets the first delta and the last at once. Between them it gets the collected deltas at
most once per interval: a small model generates thousands of tokens a second, and a message to the
ingress and on to the client costs more than a token.
"""

import asyncio
from collections.abc import Callable

from deployments.engine.output import TextDelta


class DeltaStream:
    """Collects deltas until the interval is over; the reader then gets all of them.

    Attributes:
        is_finished: Whether the reader has taken the last delta.
    """

    def __init__(self, interval_s: Callable[[], float] = lambda: 0.0) -> None:
        """Start empty.

        Args:
            interval_s: Returns the least time between two takes; the last one need not wait.
        """
        self.is_finished = False
        self._deltas: list[TextDelta] = []
        self._is_ready = asyncio.Event()
        self._interval_s = interval_s
        self._not_before_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, delta: TextDelta) -> None:
        """Add a delta; called on the reader's event loop."""
        self._deltas.append(delta)
        loop = asyncio.get_running_loop()
        if delta.finish_reason is not None or loop.time() >= self._not_before_s:
            self._is_ready.set()
        elif self._timer is None:
            self._timer = loop.call_at(self._not_before_s, self._is_ready.set)

    async def take(self) -> list[TextDelta]:
        """Wait for a delta and for the end of the interval; return all collected deltas."""
        await self._is_ready.wait()
        self._is_ready.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._not_before_s = asyncio.get_running_loop().time() + self._interval_s()
        taken, self._deltas = self._deltas, []
        self.is_finished = taken[-1].finish_reason is not None
        return taken
