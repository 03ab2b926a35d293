"""Running a step's plan so that a failure hits as few sequences as possible.

A plan is run in one forward pass for all text, and one more for each prompt with images. A pass
that raises is taken apart (`deployments.engine.isolation`), and only sequences that fail alone are
blamed. The tokens of the others are what they would have been: a pass of the same tokens writes the
same keys and values to the same places.

There is one exception. Where slots overwrite old positions with new ones, a prefill chunk behind
others can't run a second time. Such a sequence has to start over, and as it may be the one to
blame, its chunks run in passes of their own from then on.

A pass that is out of memory blames nobody, as long as it could be smaller: nothing of it has run,
and the outcome tells its size. One that can't be smaller is tried once more, with the memory that
captured steps held.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from deployments.engine.device_errors import is_fatal, is_out_of_memory, release_cache
from deployments.engine.isolation import Isolation
from deployments.engine.model_runner import StepLogits
from deployments.engine.scheduler import DecodeRow, PrefillChunk, StepPlan
from deployments.engine.sequence import Sequence

logger = logging.getLogger(__name__)

Row = DecodeRow | PrefillChunk

OUT_OF_MEMORY = "there is not enough memory for this sequence"
"""What the client of a sequence is told that lacks memory even all alone."""


@dataclass(slots=True)
class StepOutcome:
    """What became of a plan.

    Attributes:
        ran: The rows that ran, each once.
        logits: Of the passes that ran, those of the sequences that are due.
        blamed: Sequences that failed alone, with what to tell their clients.
        restarting: Sequences that did not fail, but have to start over.
        num_tokens_too_many: Tokens of the largest pass that was out of memory; 0 if none was.
    """

    ran: list[Row] = field(default_factory=list)
    logits: list[StepLogits] = field(default_factory=list)
    blamed: list[tuple[Sequence, str]] = field(default_factory=list)
    restarting: list[Sequence] = field(default_factory=list)
    num_tokens_too_many: int = 0

    def add(self, rows: Iterable[Row], logits: StepLogits | None) -> None:
        """Note a pass that ran."""
        self.ran += rows
        self.logits += [] if logits is None else [logits]


class StepGuard:
    """Runs plans and finds the sequences to blame when that fails."""

    def __init__(
        self,
        run: Callable[[StepPlan], StepLogits | None],
        device: torch.device,
        unwrapped_length: int,
        drop_graphs: Callable[[], None],
    ) -> None:
        """Take what runs a plan.

        Args:
            run: Runs a plan; it may be called again with parts of one that raised.
            device: Where it runs.
            unwrapped_length: Tokens up to which a slot overwrites none of a sequence's by newer
                ones; a chunk beyond that, unless it begins at 0, may not run twice.
            drop_graphs: Lets captured steps go; they are captured anew when they are needed.
        """
        self._run = run
        self._device = device
        self._unwrapped_length = unwrapped_length
        self._drop_graphs = drop_graphs

    def run(self, plan: StepPlan) -> StepOutcome:
        """Run what can be run of a plan.

        Raises:
            torch.AcceleratorError: The device is gone; no sequence is to blame.
        """
        outcome = StepOutcome()
        for rows in _passes(plan):
            self._run_pass(rows, outcome)
        return outcome

    def _run_pass(self, rows: tuple[Row, ...], outcome: StepOutcome) -> None:
        try:
            outcome.add(rows, self._run(_plan(rows)))
        except Exception as error:  # whatever it is, it must end one sequence, not all
            if is_fatal(error):
                raise
            is_short = is_out_of_memory(error)
            logger.warning("a pass of %d sequences failed", len(rows), exc_info=True)
        else:
            return
        for row in rows:
            row.sequence.has_strays = True
        # Only here has the traceback let go of the tensors of the pass that failed.
        if is_short:
            self._handle_shortage(rows, outcome)
        elif len(rows) == 1:
            _blame(rows[0], "the model failed on this sequence", outcome)
        else:
            self._take_apart(rows, outcome)

    def _handle_shortage(self, rows: tuple[Row, ...], outcome: StepOutcome) -> None:
        """Say how much was too much; what can't be smaller gets a second try."""
        is_least = len(rows) == 1 and not _is_divisible(rows[0])
        if is_least:
            self._drop_graphs()
        release_cache(self._device)
        if is_least:
            self._retry(rows[0], outcome)
            return
        num_tokens = _plan(rows).num_tokens
        outcome.num_tokens_too_many = max(outcome.num_tokens_too_many, num_tokens)
        outcome.restarting += [row.sequence for row in rows if not self._may_repeat(row)]

    def _retry(self, row: Row, outcome: StepOutcome) -> None:
        try:
            outcome.add((row,), self._run(_plan((row,))))
        except Exception as error:  # as above; this is the one to blame
            if is_fatal(error):
                raise
            logger.warning("the second try failed, too", exc_info=True)
            _blame(row, OUT_OF_MEMORY, outcome)

    def _take_apart(self, rows: tuple[Row, ...], outcome: StepOutcome) -> None:
        """Run rows that failed together in parts."""
        repeatable = tuple(row for row in rows if self._may_repeat(row))
        for row in rows:
            if not self._may_repeat(row):
                row.sequence.is_suspect = True
                outcome.restarting.append(row.sequence)
        isolation = Isolation[Row, StepLogits | None](
            "a part of the pass", lambda part: self._run(_plan(part))
        )
        untried = repeatable
        if len(repeatable) == len(rows):
            untried = isolation.search(rows)
        isolation.run(untried)
        for part, logits in isolation.ran:
            outcome.add(part, logits)
        for blame in isolation.blamed:
            if blame.is_out_of_memory:
                self._handle_shortage((blame.item,), outcome)
            else:
                _blame(blame.item, "the model failed on this sequence", outcome)

    def _may_repeat(self, row: Row) -> bool:
        """Return whether a row may run again after a pass with it has failed.

        A single token may: what it overwrites lies outside its own window.
        """
        return (
            isinstance(row, DecodeRow)
            or row.start == 0
            or row.end <= self._unwrapped_length
            or row.end - row.start == 1
        )


def _passes(plan: StepPlan) -> Iterator[tuple[Row, ...]]:
    """Yield the rows of each forward pass."""
    alone = [chunk for chunk in plan.prefill if _runs_alone(chunk)]
    together: tuple[Row, ...] = (*plan.decode, *(c for c in plan.prefill if not _runs_alone(c)))
    if together:
        yield together
    for chunk in alone:
        yield (chunk,)


def _runs_alone(chunk: PrefillChunk) -> bool:
    return chunk.sequence.is_suspect or not chunk.sequence.is_divisible


def _plan(rows: Iterable[Row]) -> StepPlan:
    rows = tuple(rows)
    return StepPlan(
        tuple(row for row in rows if isinstance(row, DecodeRow)),
        tuple(row for row in rows if isinstance(row, PrefillChunk)),
    )


def _is_divisible(row: Row) -> bool:
    """Return whether the row could be smaller."""
    return isinstance(row, PrefillChunk) and row.sequence.is_divisible and row.end - row.start > 1


def _blame(row: Row, why: str, outcome: StepOutcome) -> None:
    logger.error("sequence %s: %s", row.sequence.sequence_id, why)
    outcome.blamed.append((row.sequence, why))
