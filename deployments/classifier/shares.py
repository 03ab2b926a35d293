"""How what waits is shared among the lanes of a device.

On a CPU, threads that compute one micro-batch together wait for each other after every operator,
and a slice that something else takes from one core is lost on all. So each thread is a lane that
computes micro-batches of its own, and nothing waits for anything. Too little work for that runs on
all threads at once. A GPU has one lane.

The rule: a lane that is free takes an equal share, by tokens, of all that waits, and an equal share
of the threads that are free. There are as many shares as lanes, but none is smaller than the
longest text or than `MIN_SHARE_TOKENS`; so a lone text gets all threads. What was taken from the
line in one sweep is shared out before the next, so no text waits for longer than a sweep, however
many shorter ones come after it.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deployments.classifier.micro_batches import in_order, take_batch
from deployments.classifier.pieces import Piece, pieces_of
from deployments.classifier.waiting_line import Job, WaitingLine
from deployments.engine.step_budget import StepBudget

MAX_LANES = 8
"""More would wait for Python's lock, which each holds for some ms of every micro-batch."""

MIN_SHARE_TOKENS = 256
"""Micro-batches of RoBERTa-base's shape cost no more a token from here on, on one thread."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a lane computes next.

    Attributes:
        pieces: A micro-batch; none if the line was poked, or nobody wants what was left.
        num_threads: Threads to compute it on.
    """

    pieces: list[Piece]
    num_threads: int


class Shares:
    """Shares out what waits in a line, and the threads to compute it on."""

    def __init__(
        self, line: WaitingLine, budget: StepBudget, num_lanes: int, *, is_padded: bool
    ) -> None:
        """Start with all threads free: as many as torch computes with on the calling thread.

        Args:
            line: Where requests wait.
            budget: The most tokens of a micro-batch, unless one text alone has more.
            num_lanes: Threads that call `take`; each must `give_back` before it takes again.
            is_padded: Whether each text of a micro-batch counts as long as the longest.
        """
        self._line = line
        self._budget = budget
        self._num_lanes = num_lanes
        self._is_padded = is_padded
        self._turn = threading.Lock()
        self._sweep = deque[Piece]()
        self._num_left = 1
        self._freed = threading.Condition()
        self._num_free = torch.get_num_threads()

    def take(self) -> Share | None:
        """Wait for work and for a thread to do it on; None once the line is closed."""
        with self._turn:
            with self._freed:
                self._freed.wait_for(lambda: self._num_free > 0)
            if not self._sweep:
                jobs = self._line.take_all()
                self._begin(jobs or [])
            if self._line.is_closed:
                return None
            num_shares = self._num_left
            self._num_left = max(1, self._num_left - 1)
            return Share(self._next_pieces(num_shares), self._claim(num_shares))

    def give_back(self, share: Share) -> None:
        """Let others have the threads of a share that is done."""
        with self._freed:
            self._num_free += share.num_threads
            self._freed.notify()

    def _begin(self, jobs: Sequence[Job]) -> None:
        pieces = [piece for job in jobs for piece in pieces_of(job)]
        self._sweep.extend(in_order(pieces, is_padded=self._is_padded))
        self._num_left = num_shares([piece.num_tokens for piece in pieces], self._num_lanes)

    def _next_pieces(self, num_shares: int) -> list[Piece]:
        max_tokens = self._budget.tokens
        if num_shares > 1:
            sizes = [piece.num_tokens for piece in self._sweep]
            # Half a text more, so that shares are as often too large as too small.
            max_tokens = min(max_tokens, round(sum(sizes) / num_shares + max(sizes) / 2))
        return take_batch(
            self._sweep,
            max_tokens,
            is_padded=self._is_padded,
            is_wanted=lambda piece: piece.answer.is_wanted,
        )

    def _claim(self, num_shares: int) -> int:
        with self._freed:
            num_threads = max(1, self._num_free // num_shares)
            self._num_free -= num_threads
            return num_threads


def num_shares(sizes: Sequence[int], num_lanes: int) -> int:
    """Return into how many shares texts of so many tokens are divided.

    At one and a half times the longest text, two shares on a thread each take as long as one on
    two threads, which wait for each other.
    """
    if not sizes:
        return 1
    fair = round(sum(sizes) / max(*sizes, MIN_SHARE_TOKENS))
    return max(1, min(num_lanes, fair))


def choose_num_lanes(model: torch.nn.Module, device: torch.device, num_threads: int) -> int:
    """Return how many micro-batches may run side by side.

    Args:
        model: Runs them all.
        device: Where it is.
        num_threads: Threads that compute.
    """
    if device.type != "cpu" or any(map(_changes_as_it_runs, model.modules())):
        return 1
    return min(num_threads, MAX_LANES)


def _changes_as_it_runs(module: torch.nn.Module) -> bool:
    """Return whether rotary positions are recomputed for the longest text of a micro-batch.

    Source: transformers, modeling_rope_utils.py, dynamic_rope_update
    """
    kinds = getattr(module, "rope_type", None) or "default"
    names = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any("dynamic" in name or name == "longrope" for name in names)
