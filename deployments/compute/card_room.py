"""Waits for a GPU's memory that the last process to use it has not given back yet.

The driver may free the memory of a process that was killed later than the kernel frees its locks.
So a model whose turn has come, to load or to wake, looks again for a while.
"""

import time
from collections.abc import Callable
from typing import Final

ROOM_TIMEOUT_S: Final = 10.0
ROOM_INTERVAL_S: Final = 0.1


def wait_for_room(
    has_room: Callable[[], bool],
    timeout_s: float = ROOM_TIMEOUT_S,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait for room; return whether there is.

    Args:
        has_room: Looks for it, or tries to take it.
        timeout_s: Seconds after which it is not looked for any more.
        now_s: Returns the time of a monotonic clock, in seconds.
        sleep: Waits for seconds.
    """
    until_s = now_s() + timeout_s
    while not has_room():
        if now_s() >= until_s:
            return False
        sleep(ROOM_INTERVAL_S)
    return True
