"""A line in front of threads that do slow work beside the event loop.

A pool of threads takes any number of calls, and whoever comes last waits for all before. Here those
beyond a bound are refused at once, and the line does not stand in the pool itself: others who use
the same threads wait for what runs, not for what waits.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

from deployments.errors import OverloadedError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class WorkLine:
    """Lets calls into threads, in the order in which they came."""

    def __init__(self, threads: Executor, num_at_once: int, max_num_calls: int, name: str) -> None:
        """Start with nobody in line.

        Args:
            threads: Where the work is done.
            num_at_once: Calls that are with the threads at the same time.
            max_num_calls: Those, and the calls that may wait for their turn.
            name: What the calls are, for the error.
        """
        self._threads = threads
        self._turns = asyncio.Semaphore(num_at_once)
        self._max_num_calls = max_num_calls
        self._num_calls = 0
        self._name = name

    async def run(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return what the work returns; who leaves the line is forgotten.

        Raises:
            OverloadedError: Too many calls wait.
        """
        if self._num_calls >= self._max_num_calls:
            raise OverloadedError(f"Too many {self._name} wait to be looked at. Try again in 1 s.")
        self._num_calls += 1
        try:
            async with self._turns:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, work, *args)
        finally:
            self._num_calls -= 1
