"""Probation: requests that may have killed a replica run one at a time.

When a replica dies, every request that it ran is a suspect, and most are innocent. Their next
replica runs the suspects one after the other, beside its other requests, until each has shown that
it is not the cause. If that replica dies too, only the suspect on probation is to blame.

Runs on a replica's event loop; it knows neither Ray nor the engine.
"""

import asyncio
from typing import Self

from deployments.contract.generation import num_tokens_of_probation


class Probation:
    """One request's probation, as an asynchronous context: it begins when its turn has come.

    Suspects get their turns in the order of their arrival. A probation ends with the request's
    tokens, or else with the block. A request that is no suspect has no turn to wait for, and none
    to give up.

    Attributes:
        is_on: Whether other suspects wait for this one.
    """

    def __init__(self, lock: asyncio.Lock, num_deaths: int) -> None:
        """Prepare a probation.

        Args:
            lock: The replica's; a suspect on probation holds it.
            num_deaths: The request's; at 0 it is no suspect.
        """
        self.is_on = False
        self._lock = lock
        self._num_tokens_left = num_tokens_of_probation(num_deaths)

    async def __aenter__(self) -> Self:
        """Wait for a suspect's turn."""
        if self._num_tokens_left:
            await self._lock.acquire()
            self.is_on = True
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the probation unless it has ended before."""
        self.end()

    def gained(self, num_tokens: int) -> None:
        """Note new tokens of the request, and end its probation if they are enough."""
        if self.is_on:
            self._num_tokens_left -= num_tokens
            if self._num_tokens_left <= 0:
                self.end()

    def end(self) -> None:
        """Let the next suspect begin; ending twice is harmless."""
        if self.is_on:
            self.is_on = False
            self._lock.release()
