"""A deadline for another process that does not run out while this one stands still.

Ticks are counted, not seconds: if this process has slept, only one tick is late, and what has
arrived meanwhile is read before the next.
"""

import asyncio
from collections.abc import Callable
from typing import Final

TICK_S: Final = 1.0


class Countdown:
    """Calls a function once, after some ticks of the running event loop, unless it is cancelled."""

    def __init__(self, num_ticks: int, call: Callable[[], object]) -> None:
        """Begin to count.

        Args:
            num_ticks: How many there are, one or more.
            call: The function.
        """
        self._num_left = num_ticks
        self._call = call
        self._set_timer()

    def cancel(self) -> None:
        """Stop counting; harmless once the function was called."""
        self._timer.cancel()

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._num_left -= 1
        if self._num_left > 0:
            self._set_timer()
        else:
            self._call()
