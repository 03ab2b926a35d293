"""Tells when work on a device can only hang.

A thread that waits for a device or a lock for ever looks like one that computes. What tells them
apart is time: no step takes longer than the largest one does on a slow device.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

LEAST_S: Final = 5.0
"""Time for what a step does besides computing, on a busy machine: compiling, for example."""

SLOW_OPERATIONS_PER_S: Final = {"cpu": 5e9, "cuda": 10e12}
"""Operations a second, by type of device, that any device of the type exceeds: one thread of an old
CPU, and a small GPU in half of its throughput."""

ANSWER_S: Final = 1.0
"""Seconds that a check waits for a step before it asks how long the current one has run."""


def max_work_s(num_weight_bytes: int, num_tokens: int, device_type: str) -> float:
    """Return the seconds after which one pass of a model over some tokens can only hang.

    Args:
        num_weight_bytes: Bytes of the model's weights. A weight takes two operations a token, and
            at least one byte.
        num_tokens: The most tokens of a pass.
        device_type: As torch names it.
    """
    operations = 2.0 * num_weight_bytes * num_tokens
    return max(LEAST_S, operations / SLOW_OPERATIONS_PER_S.get(device_type, 5e9))


class WorkWatch:
    """Measures how long the current work of each thread has run."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Start without work.

        Args:
            now_s: Returns the time of a monotonic clock, in seconds.
        """
        self._now_s = now_s
        self._begun_s: dict[int, float] = {}

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the block as one piece of the calling thread's work."""
        thread = threading.get_ident()
        self._begun_s[thread] = self._now_s()
        try:
            yield
        finally:
            del self._begun_s[thread]

    @property
    def longest_s(self) -> float:
        """Seconds that the oldest unfinished piece of work has run; 0 if there is none."""
        # A copy is made in one step of the interpreter, so that threads may begin meanwhile.
        begun_s = list(self._begun_s.values())
        return self._now_s() - min(begun_s) if begun_s else 0.0


class Worker(Protocol):
    """A thread, or several, that works on a device."""

    @property
    def is_stuck(self) -> bool:
        """Whether the current work has run for longer than any can take."""
        ...

    def abandon(self) -> None:
        """Fail what waits for the worker, and leave its threads as they are."""
        ...


async def is_hung(worker: Worker, ping: Callable[[], Awaitable[None]]) -> bool:
    """Ping a worker, and abandon it if it can only hang; the answer comes within `ANSWER_S`.

    One that has hung for long enough already gets no ping. It is looked at again: the time may have
    passed while the machine was paused, and then its work ends now.

    Args:
        worker: The worker.
        ping: Returns once the worker has done some work; may raise anything.

    Returns:
        Whether it was abandoned. A worker that does not answer may do a long piece of work.
    """
    if worker.is_stuck:
        await asyncio.sleep(ANSWER_S)
    else:
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await ping()
                return False
    if worker.is_stuck:
        worker.abandon()
        return True
    return False
