"""What a stream has gained and its reader has not taken yet, and when readers are woken.

A reader takes all that is there, so a slow one gets fewer and larger lists. The first delta and the
last wake their reader at once. Between them, all readers with new deltas are woken together, at
most every `MIN_INTERVAL_S`, and less often when the event loop is busy: an event costs the ingress
and its client more than a small model's token costs the engine.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from deployments.contract.channel.wire import MIN_INTERVAL_S
from deployments.contract.generation import StreamKey
from deployments.contract.output import TextDelta

MAX_SHARE: Final = 0.5
"""The share of the event loop's time that readers of running streams may take."""

MAX_WAIT_S: Final = 1.0
"""The longest wait for the next round: if the process itself was stopped, no reader was busy."""


class Rounds:
    """Wakes readers together, and waits the longer the more time that takes."""

    def __init__(self) -> None:
        self._wakes: list[Callable[[], None]] = []
        self._is_planned = False
        self._due_s = 0.0

    def add(self, wake: Callable[[], None]) -> None:
        """Call a function in the next round."""
        self._wakes.append(wake)
        if not self._is_planned:
            self._plan()

    def _plan(self) -> None:
        loop = asyncio.get_running_loop()
        self._is_planned = True
        self._due_s = max(self._due_s, loop.time())
        loop.call_at(self._due_s, self._run)

    def _run(self) -> None:
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()
        # The readers run before this call, which was scheduled after them.
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        # From the due time on, so that a late round counts as a long one.
        now_s = asyncio.get_running_loop().time()
        taken_s = now_s - self._due_s
        self._due_s += max(MIN_INTERVAL_S, taken_s / MAX_SHARE)
        self._due_s = min(self._due_s, now_s + MAX_WAIT_S)
        self._is_planned = False
        if self._wakes:
            self._plan()


class StreamBox:
    """The deltas of one stream on their way to its reader.

    Attributes:
        key: Where the replica sends them.
        source: What the deltas come through; None until that is known.
        is_complete: Whether the last delta is here.
    """

    def __init__(self, key: StreamKey, rounds: Rounds) -> None:
        self.key = key
        self.source: object | None = None
        self.is_complete = False
        self._rounds = rounds
        self._deltas: list[TextDelta] = []
        self._error: Exception | None = None
        self._is_first = True
        self._is_ready = False
        self._is_in_round = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: TextDelta) -> None:
        """Add a delta; a stream that has failed takes none, since some may be missing before it."""
        if self._error is not None:
            return
        self._deltas.append(delta)
        self.is_complete = delta.finish_reason is not None
        if self._is_first or self.is_complete:
            self._wake()
        elif not self._is_in_round:
            self._is_in_round = True
            self._rounds.add(self._wake)

    def fail(self, error: Exception) -> None:
        """Raise an error in the reader once it has taken what is there, unless that is complete."""
        if not self.is_complete and self._error is None:
            self._error = error
            self._wake()

    async def take(self) -> list[TextDelta]:
        """Wait for deltas and return all that are there.

        Raises:
            Exception: The error of `fail`, after all deltas are taken.
        """
        while not self._is_ready:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_ready = self._error is not None
        taken, self._deltas = self._deltas, []
        if not taken:
            assert self._error is not None, "only deltas and an error make a box ready"
            raise self._error
        self._is_first = False
        return taken

    def _wake(self) -> None:
        self._is_in_round = False
        if not self._deltas and self._error is None:
            return  # the reader took them when the last delta woke it
        self._is_ready = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
