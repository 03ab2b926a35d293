"""Runs a step's plan so that a failure ends as few sequences as possible.

A plan runs in one forward pass for all text and one more for each prompt with images. A pass that
raises is bisected (`deployments.compute.bisection`), and only sequences that fail when run by
themselves end. The tokens of the others do not change: a repeated pass writes the same keys and
values to the same places.

There is one exception. Where new tokens overwrite old ones, a chunk that continues a prefill can't
run a second time. Such a sequence restarts. As it may have caused the failure, its chunks run in
separate passes from then on.

A pass that runs out of memory fails no sequence if it could be smaller: none of its rows count as
run, and the outcome reports its size. A pass that can't be smaller is retried once, after freeing
the memory of captured steps.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from deployments.compute.bisection import Bisection
from deployments.compute.device_errors import is_fatal, is_out_of_memory, release_cache
from deployments.engine.model.runner import StepLogits
from deployments.engine.scheduling.scheduler import DecodeRow, PrefillChunk, StepPlan
from deployments.engine.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)

Row = DecodeRow | PrefillChunk

OUT_OF_MEMORY = "there is not enough memory for this sequence"
"""The error of a sequence that runs out of memory even when run by itself."""


@dataclass(slots=True)
class StepOutcome:
    """The outcome of running a plan.

    Attributes:
        ran: The rows that ran, each once.
        logits: The logits of all passes that ran, for the sequences whose next token is due.
        failed: Sequences that failed when run by themselves, each with the error for its client.
        restarting: Sequences that must start over, since their chunk can't run a second time.
        num_oom_tokens: Tokens of the largest pass that ran out of memory; 0 if none did.
    """

    ran: list[Row] = field(default_factory=list)
    logits: list[StepLogits] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)
    restarting: list[Sequence] = field(default_factory=list)
    num_oom_tokens: int = 0

    def add(self, rows: Iterable[Row], logits: StepLogits | None) -> None:
        """Add a pass that ran."""
        self.ran += rows
        self.logits += [] if logits is None else [logits]


class StepRecovery:
    """Runs plans and finds the sequences that make them fail."""

    def __init__(
        self,
        run: Callable[[StepPlan], StepLogits | None],
        device: torch.device,
        full_context_length: int,
        drop_captured: Callable[[], None],
    ) -> None:
        """Set up recovery for a model runner.

        Args:
            run: Runs a plan; may be called again with parts of a plan that raised.
            device: The device that `run` uses.
            full_context_length: The longest sequence that overwrites none of its tokens. A chunk
                that ends beyond it may not run twice, unless it starts at 0.
            drop_captured: Frees all captured steps; they are captured again on demand.
        """
        self._run = run
        self._device = device
        self._full_context_length = full_context_length
        self._drop_captured = drop_captured

    def run(self, plan: StepPlan) -> StepOutcome:
        """Run all rows of a plan that can run.

        Raises:
            torch.AcceleratorError: The device is unusable; no sequence caused it.
        """
        outcome = StepOutcome()
        for rows in _passes(plan):
            self._run_pass(rows, outcome)
        return outcome

    def _run_pass(self, rows: tuple[Row, ...], outcome: StepOutcome) -> None:
        try:
            outcome.add(rows, self._run(_plan(rows)))
        except Exception as error:  # any error must end one sequence, not all
            if is_fatal(error):
                raise
            is_short = is_out_of_memory(error)
            logger.warning("a pass of %d sequences failed", len(rows), exc_info=True)
        else:
            return
        for row in rows:
            row.sequence.has_uncounted_kv = True
        # Not in the except block, where the traceback still holds the failed pass's tensors.
        if is_short:
            self._handle_shortage(rows, outcome)
        elif len(rows) == 1:
            _fail(rows[0], "the model failed on this sequence", outcome)
        else:
            self._bisect(rows, outcome)

    def _handle_shortage(self, rows: tuple[Row, ...], outcome: StepOutcome) -> None:
        """Report a pass that ran out of memory; retry one that can't be smaller."""
        is_least = len(rows) == 1 and not _can_be_smaller(rows[0])
        if is_least:
            self._drop_captured()
        release_cache(self._device)
        if is_least:
            self._retry(rows[0], outcome)
            return
        num_tokens = _plan(rows).num_tokens
        outcome.num_oom_tokens = max(outcome.num_oom_tokens, num_tokens)
        outcome.restarting += [row.sequence for row in rows if not self._may_repeat(row)]

    def _retry(self, row: Row, outcome: StepOutcome) -> None:
        try:
            outcome.add((row,), self._run(_plan((row,))))
        except Exception as error:  # as above; the pass has only this row, so it is the cause
            if is_fatal(error):
                raise
            logger.warning("the retry failed, too", exc_info=True)
            _fail(row, OUT_OF_MEMORY, outcome)

    def _bisect(self, rows: tuple[Row, ...], outcome: StepOutcome) -> None:
        """Rerun the rows of a failed pass in parts."""
        repeatable = tuple(row for row in rows if self._may_repeat(row))
        for row in rows:
            if not self._may_repeat(row):
                row.sequence.is_suspect = True
                outcome.restarting.append(row.sequence)
        bisection = Bisection[Row, StepLogits | None](
            "a part of the pass", lambda part: self._run(_plan(part))
        )
        untried = repeatable
        if len(repeatable) == len(rows):
            untried = bisection.search(rows)
        bisection.run(untried)
        for part, logits in bisection.ran:
            outcome.add(part, logits)
        for failure in bisection.failures:
            if failure.is_out_of_memory:
                self._handle_shortage((failure.item,), outcome)
            else:
                _fail(failure.item, "the model failed on this sequence", outcome)

    def _may_repeat(self, row: Row) -> bool:
        """Return whether a row may run again after a failed pass.

        A single token may: the position that it overwrites is outside its own window.
        """
        return (
            isinstance(row, DecodeRow)
            or row.start == 0
            or row.end <= self._full_context_length
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
    return chunk.sequence.is_suspect or chunk.has_images


def _plan(rows: Iterable[Row]) -> StepPlan:
    rows = tuple(rows)
    return StepPlan(
        tuple(row for row in rows if isinstance(row, DecodeRow)),
        tuple(row for row in rows if isinstance(row, PrefillChunk)),
    )


def _can_be_smaller(row: Row) -> bool:
    """Return whether the row could run as several smaller chunks."""
    return isinstance(row, PrefillChunk) and not row.has_images and row.end - row.start > 1


def _fail(row: Row, why: str, outcome: StepOutcome) -> None:
    logger.error("sequence %s: %s", row.sequence.sequence_id, why)
    outcome.failed.append((row.sequence, why))
