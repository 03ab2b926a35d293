"""Probation: requests that may have killed a replica run one at a time.

When a replica dies, every request that it ran is a suspect, and most are innocent. Their next
replica runs the suspects one after the other, beside its other requests, until each has shown that
it is not the cause. If that replica dies too, only the suspect on probation is to blame.

Runs on a replica's event loop; it knows neither Ray nor the engine.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

NUM_TOKENS: Final = 1
"""Tokens that a suspect must gain: encoding and prefill are where a request kills a replica."""

NUM_TOKENS_AGAIN: Final = 32
"""Tokens that it must gain after a second death: it may need some tokens to kill a replica."""


class Trial:
    """One request's probation; a request that is no suspect has none to end."""

    def __init__(self, lock: asyncio.Lock | None = None, num_tokens: int = 0) -> None:
        """Begin.

        Args:
            lock: Held until the trial ends; None if the request is no suspect.
            num_tokens: Tokens that end the trial.
        """
        self._lock = lock
        self._num_tokens_left = num_tokens

    @property
    def is_on(self) -> bool:
        """Whether the request holds up other suspects."""
        return self._lock is not None

    def gained(self, num_tokens: int) -> None:
        """Note new tokens, and end the trial if they are enough."""
        if self._lock is not None:
            self._num_tokens_left -= num_tokens
            if self._num_tokens_left <= 0:
                self.end()

    def end(self) -> None:
        """Let the next suspect begin; ending twice is harmless."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class Probation:
    """Lets suspects begin one at a time, in the order of their arrival."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def trial(self, num_deaths: int) -> AsyncIterator[Trial]:
        """Wait for a suspect's turn, and end its trial with the block if it has not ended before.

        Args:
            num_deaths: The request's; at 0 it is no suspect and does not wait.
        """
        if not num_deaths:
            yield Trial()
            return
        await self._lock.acquire()
        trial = Trial(self._lock, NUM_TOKENS if num_deaths == 1 else NUM_TOKENS_AGAIN)
        try:
            yield trial
        finally:
            trial.end()
