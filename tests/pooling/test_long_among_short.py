"""Short texts beside long ones on a CPU's two lanes, in simulated time: no clock is read."""

import heapq
import itertools

import numpy as np
import pytest

from deployments.compute.token_budget import TokenBudget
from deployments.pooling.lanes import Lanes, LaneWork
from deployments.pooling.request_queue import Job, QueueLimits, RequestQueue

NUM_SHORT, SHORT_TOKENS = 200, 60
NUM_PIECES, PIECE_TOKENS = 17, 90
"""A text of 5,000 characters in pieces of 300."""

BATCH_TOKENS = 8
"""What a micro-batch costs beside its texts."""


pytestmark = pytest.mark.usefixtures("two_threads")


class Simulation:
    """Users of two lanes of a thread each, in simulated time.

    Attributes:
        short: How long the short texts took, in tokens that one thread computes.
        num_long: The long texts that were answered.
    """

    def __init__(self) -> None:
        self.short = list[float]()
        self.num_long = 0
        self._queue = RequestQueue(QueueLimits(10**6, None))
        self._lanes = Lanes(self._queue, TokenBudget(2048), 2, is_padded=False)
        self._now = 0.0
        self._num_free = 2
        self._num_sent = 0
        self._asked: dict[Job, float] = {}
        self._running: list[tuple[float, int, LaneWork]] = []  # by the time of their end
        self._numbers = itertools.count()

    def run(self, num_users: int, num_long_users: int) -> "Simulation":
        """Let users send short texts one after the other, and others long ones."""
        for _ in range(num_users):
            self._ask_short()
        for _ in range(num_long_users):
            self._ask_long()
        while len(self.short) < NUM_SHORT:
            while self._num_free and self._has_work:
                self._begin()
            self._end()
        return self

    def _ask(self, *sizes: int) -> None:
        job = Job()
        self._queue._enter(job)
        self._queue.put(job, tuple((0,) * size for size in sizes))
        self._asked[job] = self._now

    def _ask_short(self) -> None:
        if self._num_sent < NUM_SHORT:
            self._num_sent += 1
            self._ask(SHORT_TOKENS)

    def _ask_long(self) -> None:
        self._ask(*[PIECE_TOKENS] * NUM_PIECES)

    @property
    def _has_work(self) -> bool:
        return bool(self._lanes._sweeps or self._lanes._waiting or self._queue.num_waiting)

    def _begin(self) -> None:
        work = self._lanes.take()
        assert work is not None
        self._num_free -= work.num_threads
        num_tokens = BATCH_TOKENS + sum(text.num_tokens for text in work.texts)
        ends = self._now + num_tokens / work.num_threads
        heapq.heappush(self._running, (ends, next(self._numbers), work))

    def _end(self) -> None:
        self._now, _, work = heapq.heappop(self._running)
        self._num_free += work.num_threads
        self._lanes.give_back(work)
        for text in work.texts:
            text.answer.note(text.index, b"")
        for job in [job for job in self._asked if job.answer.done()]:
            took = self._now - self._asked.pop(job)
            self._queue._leave(job)
            if len(job.sequences) == 1:
                self.short.append(took)
                self._ask_short()
            else:
                self.num_long += 1
                self._ask_long()

    @property
    def p95(self) -> float:
        return float(np.percentile(self.short, 95))


@pytest.mark.parametrize("num_users", [8, 16, 32, 200])
def test_the_p95_of_short_texts_grows_by_half_at_most_beside_a_user_of_long_ones(
    num_users: int,
) -> None:
    alone, beside = Simulation().run(num_users, 0), Simulation().run(num_users, 1)
    assert beside.p95 <= 1.5 * alone.p95


def test_a_long_text_is_answered_while_others_ask() -> None:
    assert Simulation().run(8, 1).num_long == 2
