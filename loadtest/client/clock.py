"""The clock of a run."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns the seconds of a monotonic clock."""


def clock_from_now() -> Clock:
    """Return a monotonic clock that starts at zero."""
    origin_s = time.monotonic()
    return lambda: time.monotonic() - origin_s
