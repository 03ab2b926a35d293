"""Divides waiting texts among a device's lanes.

On a CPU, threads that compute one micro-batch together wait for each other after every operator, so
time that one core loses to other processes is lost on all. Therefore each thread is a lane with its
own micro-batches, and no lane waits for another. If there is too little work for that, one
micro-batch runs on all threads.

A GPU has two lanes, of which one prepares and launches the next micro-batch while the other waits
for its own. They don't divide the texts: each takes all that a micro-batch holds.

The rule: a free lane takes an equal part, by tokens, of the waiting texts. There are as many parts
as lanes, but no part is smaller than the longest text or than `MIN_LANE_TOKENS`. A part that is
taken alone, such as a single text, gets all threads; any other gets its lane's. A sweep takes
something of every request that waits (`RoundRobin`), and all of it is handed out before the next
sweep. So a request's next text waits for one sweep at most, however many come after it, and a
request of many texts leaves room for those that come meanwhile.

Each tenant and priority has sweeps of its own: what comes from others meanwhile is taken at once,
and the next part begins with the texts of the best priority, of the tenant that got least.

A request's texts may run in several micro-batches, on several threads at once. It is answered once:
when all its texts are done, or as soon as one fails.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate

import torch

from deployments.compute.token_budget import TokenBudget
from deployments.contract.claims import Claim
from deployments.pooling.micro_batches import RoundRobin, in_order, take_batch
from deployments.pooling.request_queue import Job, RequestQueue, Row, TokenIds

MAX_LANES = 8
"""More lanes would wait for Python's GIL, which each holds for some ms of every micro-batch."""

GPU_LANES = 2
"""More would take waiting texts earlier than the GPU needs them, into smaller micro-batches."""

MIN_LANE_TOKENS = 96
"""Larger parts cost hardly less per token, for RoBERTa-base's shape on one thread; and if all texts
are one part, the device idles while their clients send the next ones."""

NUM_BATCHES_IN_SWEEP = 8
"""Where a full micro-batch is worth waiting for, a sweep has so many, if there is work for them:
the last of each may be small, and padded texts need neighbours of their length."""


class Answer:
    """Collects the answer to one job; any thread may add to it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._found: dict[int, Row] = {}
        self._lock = threading.Lock()

    @property
    def claim(self) -> Claim:
        """What the job may claim beside others."""
        return self._job.claim

    @property
    def came_s(self) -> float:
        """When the job came, by its queue's clock."""
        return self._job.came_s

    @property
    def is_wanted(self) -> bool:
        """Whether the client still waits for the answer."""
        return not self._job.has_left and not self._job.answer.done()

    def begin(self) -> None:
        """Note that the device computes a text of the job."""
        self._job.has_begun = True

    def note(self, index: int, outcome: Row | Exception) -> None:
        """Add the result of one text; the first failure ends the job."""
        with self._lock:
            if self._job.answer.done():
                return
            with suppress(InvalidStateError):  # the job has been given back meanwhile
                if isinstance(outcome, Exception):
                    self._job.answer.set_exception(outcome)
                    return
                self._found[index] = outcome
                if len(self._found) == len(self._job.sequences):
                    self._job.answer.set_result([self._found[i] for i in range(len(self._found))])


@dataclass(frozen=True, slots=True)
class EncodedText:
    """One text of a job.

    Attributes:
        index: The text's index among the job's texts.
        token_ids: The text, encoded.
        answer: Collects the results of the job's texts.
        type_ids: Which of a pair's texts each token belongs to; None: all to the first.
    """

    index: int
    token_ids: TokenIds
    answer: Answer
    type_ids: TokenIds | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens to compute."""
        return len(self.token_ids)


def texts_of(job: Job) -> list[EncodedText]:
    """Return a job's texts; they share its answer."""
    answer = Answer(job)
    type_ids = job.type_ids or (None,) * len(job.sequences)
    return [
        EncodedText(index, token_ids, answer, types)
        for index, (token_ids, types) in enumerate(zip(job.sequences, type_ids, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class LaneWork:
    """The next micro-batch of a lane.

    Attributes:
        texts: Empty if the queue was poked, or if no remaining text is still wanted.
        num_threads: Number of threads to compute on.
        is_alone: Whether no other lane runs work meanwhile.
    """

    texts: list[EncodedText]
    num_threads: int
    is_alone: bool


class Sweep:
    """The texts of one tenant and priority that are not handed out yet, and figures of them.

    The figures of any rest are computed at the start, so that a micro-batch costs its own texts
    alone, however many wait behind it.

    Attributes:
        texts: In order; take them from the left. Never empty when a figure is asked for.
    """

    def __init__(self, texts: Sequence[EncodedText]) -> None:
        self.texts = deque(texts)
        last_first = texts[::-1]
        sizes = [text.num_tokens for text in last_first]
        # Item i of each is about the last i + 1 texts.
        self._num_tokens = list(accumulate(sizes))
        self._longest = list(accumulate(sizes, max))
        self._came_s = list(accumulate((text.answer.came_s for text in last_first), min))

    @property
    def num_tokens(self) -> int:
        """Tokens of all its texts."""
        return self._num_tokens[len(self.texts) - 1]

    @property
    def longest(self) -> int:
        """Tokens of its longest text."""
        return self._longest[len(self.texts) - 1]

    @property
    def came_s(self) -> float:
        """When its oldest text came, by the queue's clock."""
        return self._came_s[len(self.texts) - 1]


class Lanes:
    """Hands out the texts of a queue and the compute threads to a device's lanes."""

    def __init__(
        self,
        queue: RequestQueue,
        budget: TokenBudget,
        num_lanes: int,
        *,
        is_padded: bool,
        share_threads: bool = True,
    ) -> None:
        """Start with all threads free: as many as torch computes with on the calling thread.

        Args:
            queue: The waiting requests.
            budget: Limits the tokens of a micro-batch; a longer text runs by itself.
            num_lanes: Threads that call `take`; each must call `give_back` before it takes again.
            is_padded: Whether each text of a micro-batch costs as much as the longest.
            share_threads: Whether lanes share the threads and divide what waits, as on a CPU.
        """
        self._queue = queue
        self._budget = budget
        self._num_lanes = num_lanes
        self._is_padded = is_padded
        self._turn = threading.Lock()
        self._sweeps: dict[tuple[int, str], Sweep] = {}  # by priority and tenant; none empty
        self._waiting: dict[tuple[int, str], RoundRobin[EncodedText]] = {}  # what later sweeps get
        self._num_left = 1
        self._freed = threading.Condition()
        self._share_threads = share_threads
        self._num_threads = torch.get_num_threads() if share_threads else num_lanes
        self._num_free = self._num_threads

    def take(self) -> LaneWork | None:
        """Wait for work and a free thread, and return them; None once the queue is closed."""
        with self._turn:
            with self._freed:
                self._freed.wait_for(lambda: self._num_free > 0)
            is_idle = not self._sweeps and not self._waiting
            jobs = self._queue.take_all() if is_idle else self._queue.take_others(self._sweeps)
            for job in jobs or ():
                self._waiting.setdefault(job.claim.queue, RoundRobin(MIN_LANE_TOKENS)).add(
                    texts_of(job)
                )
            if not self._sweeps or self._waiting.keys() - self._sweeps.keys():
                self._begin()
            if self._queue.is_closed:
                return None
            num_parts = self._num_left
            self._num_left = max(1, self._num_left - 1)
            num_threads = self._take_threads(num_parts)
            is_alone = num_threads == self._num_threads
            return LaneWork(self._next_texts(num_parts), num_threads, is_alone)

    def give_back(self, work: LaneWork) -> None:
        """Free the threads of finished work."""
        with self._freed:
            self._num_free += work.num_threads
            self._freed.notify_all()

    @contextmanager
    def held_up(self, timeout_s: float) -> Iterator[bool]:
        """Wait until no lane runs work, and let none begin any while the block runs.

        Args:
            timeout_s: The longest wait.

        Yields:
            Whether none runs any.
        """
        with self._freed:
            yield self._freed.wait_for(lambda: self._num_free == self._num_threads, timeout_s)

    def _begin(self) -> None:
        """Begin a sweep of each tenant and priority that has none."""
        for queue in [queue for queue in self._waiting if queue not in self._sweeps]:
            texts = self._waiting[queue].take(*self._sweep_tokens, _is_wanted)
            if texts:
                self._sweeps[queue] = Sweep(in_order(texts, is_padded=self._is_padded))
        self._waiting = {queue: texts for queue, texts in self._waiting.items() if texts}
        self._num_left = (
            num_parts(self._num_tokens, self._longest, self._num_lanes)
            if self._share_threads
            else 1
        )

    @property
    def _sweep_tokens(self) -> tuple[int, int]:
        """Tokens of a sweep that completes a request, and of one that does not."""
        if self._share_threads and not self._is_padded:
            num_least = self._num_threads * MIN_LANE_TOKENS
            return num_least, max(num_least, self._budget.tokens)
        return (NUM_BATCHES_IN_SWEEP * self._budget.tokens,) * 2

    @property
    def _num_tokens(self) -> int:
        return sum(sweep.num_tokens for sweep in self._sweeps.values())

    @property
    def _longest(self) -> int:
        return max((sweep.longest for sweep in self._sweeps.values()), default=0)

    def _next_texts(self, num_parts: int) -> list[EncodedText]:
        max_tokens = self._budget.tokens
        if num_parts > 1:
            # Allow half a text more, so that parts are too large as often as too small.
            max_tokens = min(max_tokens, round(self._num_tokens / num_parts + self._longest / 2))
        order = self._queue.in_order({queue: sweep.came_s for queue, sweep in self._sweeps.items()})
        texts = take_batch(
            [self._sweeps[queue].texts for queue in order],
            max_tokens,
            is_padded=self._is_padded,
            is_wanted=_is_wanted,
        )
        for text in texts:
            text.answer.begin()
        self._queue.charge([(text.answer.claim, text.num_tokens) for text in texts])
        self._sweeps = {queue: self._sweeps[queue] for queue in order if self._sweeps[queue].texts}
        return texts

    def _take_threads(self, num_parts: int) -> int:
        with self._freed:
            is_alone = (
                self._share_threads and num_parts == 1 and self._num_free == self._num_threads
            )
            num_own = max(1, self._num_threads // self._num_lanes)
            num_threads = self._num_threads if is_alone else min(num_own, self._num_free)
            self._num_free -= num_threads
            return num_threads


def _is_wanted(text: EncodedText) -> bool:
    return text.answer.is_wanted


def num_parts(num_tokens: int, longest: int, num_lanes: int) -> int:
    """Return the number of parts for some texts.

    The break-even is at one and a half times the longest text: there, two parts on one thread each
    take as long as one part on two threads that wait for each other.

    Args:
        num_tokens: Tokens of all texts.
        longest: Tokens of the longest one.
        num_lanes: The most parts.
    """
    return max(1, min(num_lanes, round(num_tokens / max(longest, MIN_LANE_TOKENS))))


def choose_num_lanes(model: torch.nn.Module, device: torch.device, num_threads: int) -> int:
    """Return how many micro-batches may run at the same time.

    Args:
        model: The model that runs them.
        device: The model's device.
        num_threads: Number of compute threads.
    """
    if any(map(_changes_as_it_runs, model.modules())):
        return 1
    return min(num_threads, MAX_LANES) if device.type == "cpu" else GPU_LANES


def _changes_as_it_runs(module: torch.nn.Module) -> bool:
    """Return whether a module recomputes its rotary positions for each micro-batch's longest text.

    Source: transformers, modeling_rope_utils.py, dynamic_rope_update
    """
    kinds = getattr(module, "rope_type", None) or "default"
    names = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any("dynamic" in name or name == "longrope" for name in names)
