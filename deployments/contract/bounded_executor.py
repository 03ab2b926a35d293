"""A bounded queue in front of threads that do slow work off the event loop.

A thread pool accepts any number of calls, and the last one waits for all before it. This executor
rejects calls beyond a bound at once. Its queue is outside the pool, so other users of the same
threads wait only for running calls, not for queued ones.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

from deployments.contract.errors import OverloadedError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class BoundedExecutor:
    """Runs calls on threads, in order of arrival."""

    def __init__(self, threads: Executor, num_at_once: int, max_num_calls: int, name: str) -> None:
        """Start with an empty queue.

        Args:
            threads: The threads that run the calls.
            num_at_once: The most calls that run on the threads at once.
            max_num_calls: The most calls in all, running and queued.
            name: What the calls process, as a plural noun for the error message.
        """
        self._threads = threads
        self._turns = asyncio.Semaphore(num_at_once)
        self._max_num_calls = max_num_calls
        self._num_calls = 0
        self._name = name

    async def run(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run the work on a thread and return its result; a cancelled call leaves the queue.

        Raises:
            OverloadedError: Too many calls are queued.
        """
        if self._num_calls >= self._max_num_calls:
            raise OverloadedError(f"Too many {self._name} are queued. Try again in 1 s.")
        self._num_calls += 1
        try:
            async with self._turns:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, work, *args)
        finally:
            self._num_calls -= 1
