"""Clients that ask again and again while a test changes the cluster."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx

from tests.faults.served.answer import Answer, assert_equal, opened, read
from tests.faults.served.kinds import Body
from tests.measured import Record


class Load:
    """Clients, each with one stream at a time."""

    def __init__(self, client: httpx.AsyncClient, bodies: Sequence[Body], num_clients: int) -> None:
        """Ask for nothing yet; each of the clients will go through the bodies in turn."""
        self.answers: list[Answer] = []  # the answers that have ended
        # The undisturbed answers to the same requests, in the same order.
        self.expected: list[Answer] = []
        self._client = client
        self._bodies = bodies
        self._open: list[Answer | None] = [None] * num_clients
        self._is_over = False

    @property
    def open(self) -> list[Answer]:
        """The answers that are being read."""
        return [answer for answer in self._open if answer is not None]

    async def _ask(self, index: int, undisturbed: Sequence[Answer]) -> None:
        for number in itertools.islice(itertools.cycle(range(len(self._bodies))), index, None):
            async with opened(self._client, self._bodies[number]) as stream:
                answer = self._open[index] = stream.answer
                assert answer.status == 200, answer.body
                await stream.read_to_end()
            self._open[index] = None
            self.answers.append(answer)
            self.expected.append(undisturbed[number])
            if self._is_over:
                return

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ask until the block ends; then wait for the last answers."""
        undisturbed = await asyncio.gather(*(read(self._client, body) for body in self._bodies))
        async with asyncio.TaskGroup() as clients:
            for index in range(len(self._open)):
                clients.create_task(self._ask(index, undisturbed))
            yield
            self._is_over = True

    def check(self, record: Record) -> None:
        """Fail unless each answer is the undisturbed one."""
        assert_equal(self.answers, self.expected)
        record("requests, all whole and equal", len(self.answers))
        record("streams moved", sum(bool(answer.lost_at) for answer in self.answers))
        record("longest pause, s", round(max(each.longest_gap_s for each in self.answers), 2))
