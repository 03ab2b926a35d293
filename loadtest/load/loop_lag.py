"""Measures how busy the tool itself is, by its event loop's delays and its CPU time."""

import asyncio
import time
from types import TracebackType
from typing import Final, Self

INTERVAL_S: Final = 0.02


class LagMeter:
    """Sleeps repeatedly for a fixed time while its block runs, and records how late it wakes.

    Attributes:
        lag_ms: The delay of each wake-up.
        cpu_share: The process's CPU time per second; set when the block ends.
    """

    def __init__(self) -> None:
        self.lag_ms: list[float] = []
        self.cpu_share = 0.0

    def __enter__(self) -> Self:
        """Start measuring; needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._started_s, self._cpu_s = time.monotonic(), time.process_time()
        self._sleep()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop measuring."""
        self._timer.cancel()
        elapsed_s = time.monotonic() - self._started_s
        self.cpu_share = (time.process_time() - self._cpu_s) / elapsed_s if elapsed_s else 0.0

    def _sleep(self) -> None:
        self._due_s = time.monotonic() + INTERVAL_S
        self._timer = self._loop.call_later(INTERVAL_S, self._wake)

    def _wake(self) -> None:
        late_ms = (time.monotonic() - self._due_s) * 1000
        # The loop's timers have a resolution of a millisecond and may fire half of one early.
        self.lag_ms.append(round(max(0.0, late_ms), 3))
        self._sleep()
