"""Suspects that begin only when their ingress knows that they do.

When a replica dies, its last messages may be lost with it. If a suspect began after a mere message,
its ingress could take it for one that still waited, and send it on to kill the next replica. So the
replica announces the suspect's turn in `Started`, and the ingress answers over the channel. It
blames the suspect for a death from its answer on.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final

from deployments.channel.countdown import TICK_S

MAX_NUM_TICKS: Final = 5
"""How long a suspect whose turn has come waits for its ingress, while other suspects wait for it.
Normally the answer takes milliseconds. Ticks are counted, not seconds: a process that has slept is
late by one."""


class GoAhead:
    """The permission for one suspect to begin.

    Attributes:
        number: By which the ingress names it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._given: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def give(self) -> None:
        """Let the suspect begin; giving it twice is harmless."""
        if not self._given.done():
            self._given.set_result(None)

    async def is_given(self) -> bool:
        """Wait for the ingress; return whether the suspect may begin."""
        for _ in range(MAX_NUM_TICKS):
            await asyncio.wait([self._given], timeout=TICK_S)
            if self._given.done():
                return True
        return False


class GoAheads:
    """The permissions that a replica waits for."""

    def __init__(self) -> None:
        self._numbers = count()
        self._expected: dict[int, GoAhead] = {}

    @contextmanager
    def expect(self) -> Iterator[GoAhead]:
        """Take a permission in until the block ends; its number is never used again."""
        go_ahead = GoAhead(next(self._numbers))
        self._expected[go_ahead.number] = go_ahead
        try:
            yield go_ahead
        finally:
            del self._expected[go_ahead.number]

    def give(self, number: int) -> None:
        """Give the permission of this number; one that nobody expects is ignored."""
        go_ahead = self._expected.get(number)
        if go_ahead is not None:
            go_ahead.give()
