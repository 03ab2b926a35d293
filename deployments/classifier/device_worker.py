"""The one thread that owns the device.

Whenever the device is free it takes all that waits: nothing waits for a timeout, and batches grow
with the load by themselves. What was taken in one sweep is finished before the next, so no text
waits for longer than a sweep, however many shorter ones come after it. The model is made on the
thread as well: its OpenMP workers belong to one thread.

A micro-batch that fails is taken apart, and only texts that fail alone fail their requests. One
that is out of memory makes the next ones smaller, for a while.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from deployments.classifier.micro_batches import in_order, take_batch
from deployments.classifier.waiting_line import Job, Probabilities, TokenIds, WaitingLine
from deployments.engine.device_errors import is_fatal, is_out_of_memory, release_cache
from deployments.engine.isolation import Isolation
from deployments.engine.step_budget import StepBudget
from deployments.errors import ClassificationFailedError, ReplicaUnavailableError

logger = logging.getLogger(__name__)


class Classifier(Protocol):
    """A model, as far as the worker is concerned."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    @property
    def is_padded(self) -> bool:
        """Whether each sequence of a batch costs as much as the longest."""
        ...

    @property
    def probe(self) -> TokenIds:
        """A short text, which an idle device runs to show that it can."""
        ...

    def __call__(self, sequences: Sequence[TokenIds]) -> torch.Tensor:
        """Return probabilities, [len(sequences), num_labels], float32, on the CPU.

        Not finite where the model gave no finite numbers.
        """
        ...


@dataclass(frozen=True, slots=True)
class BatchStats:
    """One micro-batch.

    Attributes:
        num_sequences: Texts of it.
        num_tokens: Of those texts, without padding.
    """

    num_sequences: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """One text of a job."""

    job: Job
    index: int

    @property
    def token_ids(self) -> TokenIds:
        return self.job.sequences[self.index]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class DeviceWorker:
    """Classifies what waits in a line."""

    def __init__(
        self,
        make_classifier: Callable[[], Classifier],
        line: WaitingLine,
        max_batched_tokens: int,
        on_batch: Callable[[BatchStats], None],
    ) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            make_classifier: Called once, on the thread.
            line: Where requests wait; the worker closes it when it ends.
            max_batched_tokens: Most tokens of a micro-batch, unless one text alone has more.
            on_batch: Called on the thread after each micro-batch.
        """
        self.num_batches = 0
        self._make_classifier = make_classifier
        self._line = line
        self._budget = StepBudget(max_batched_tokens)
        self._on_batch = on_batch
        self._pings: deque[Future[None]] = deque()
        self._classifier: Future[Classifier] = Future()
        self._thread = threading.Thread(target=self._run, name="classifier", daemon=True)

    def start(self) -> "Future[Classifier]":
        """Start the thread; the future holds the model, or why it could not be made."""
        self._thread.start()
        return self._classifier

    def stop(self) -> None:
        """End the thread after the micro-batch that runs now; unfinished requests fail."""
        self._line.close()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether what waits will be classified."""
        return self._thread.is_alive()

    def ping(self) -> "Future[None]":
        """Return what is done with the next micro-batch; an idle device runs one for it."""
        pinged: Future[None] = Future()
        self._pings.append(pinged)
        self._line.poke()
        # The thread closes the line before it answers the last pings: one of both sees this ping.
        if self._line.is_closed:
            self._answer_pings(_dead())
        return pinged

    def _run(self) -> None:
        try:
            classifier = self._make_classifier()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the model is told
            self._line.close()
            self._classifier.set_exception(error)
            self._answer_pings(_dead())
            return
        self._classifier.set_result(classifier)
        try:
            while (jobs := self._line.take_all()) is not None:
                self._turn(classifier, jobs)
        except BaseException:
            logger.exception("the classifier's thread failed; the replica must be replaced")
        self._line.close()
        self._line.fail_all(_dead())
        self._answer_pings(_dead())

    def _turn(self, classifier: Classifier, jobs: list[Job]) -> None:
        self._sweep(classifier, jobs)
        if (
            self._pings
        ):  # there was no micro-batch to answer them; perhaps all jobs' clients have left
            self._probe(classifier)

    def _probe(self, classifier: Classifier) -> None:
        """Run something for those who ask how the device is, and tell them.

        Raises:
            torch.AcceleratorError: The device is gone.
        """
        try:
            classifier([classifier.probe])
        except Exception as error:
            if is_fatal(error):
                raise
            logger.warning("the device failed a probe", exc_info=True)
            self._answer_pings(ReplicaUnavailableError("The classifier's device failed a probe."))
            return
        self._note_batch(BatchStats(0, 0))

    def _sweep(self, classifier: Classifier, jobs: list[Job]) -> None:
        """Classify all texts of these jobs, and answer each job when its last text is done."""
        answers = {job: _Answer(job) for job in jobs}
        pieces = [_Piece(job, index) for job in jobs for index in range(len(job.sequences))]
        waiting = deque(in_order(pieces, is_padded=classifier.is_padded))
        while not self._line.is_closed:
            batch = take_batch(
                waiting,
                self._budget.tokens,
                is_padded=classifier.is_padded,
                is_wanted=lambda piece: answers[piece.job].is_wanted,
            )
            if not batch:
                return
            for piece, outcome in self._run_batch(classifier, batch):
                answers[piece.job].note(piece.index, outcome)
            self._note_batch(BatchStats(len(batch), sum(piece.num_tokens for piece in batch)))

    def _run_batch(
        self, classifier: Classifier, batch: list[_Piece]
    ) -> Iterator[tuple[_Piece, Probabilities | Exception]]:
        """Yield what became of each text of a micro-batch.

        Raises:
            torch.AcceleratorError: The device is gone; no text is to blame.
        """
        run = _GuardedRun(classifier)
        isolation = Isolation[_Piece, torch.Tensor]("a micro-batch", run)
        isolation.run(batch)
        if run.num_tokens_too_many:
            self._budget.shrink(run.num_tokens_too_many)
        else:
            self._budget.note_good_step()
        for pieces, probabilities in isolation.ran:
            finite = probabilities.isfinite().all(dim=1).tolist()
            for piece, row, is_finite in zip(pieces, probabilities.tolist(), finite, strict=True):
                yield piece, tuple(row) if is_finite else _failure(piece, "gave no finite numbers")
        for blame in isolation.blamed:
            why = "has not enough memory" if blame.is_out_of_memory else "failed"
            yield blame.item, _failure(blame.item, why)

    def _note_batch(self, stats: BatchStats) -> None:
        self.num_batches += 1
        self._answer_pings(None)
        self._on_batch(stats)

    def _answer_pings(self, error: Exception | None) -> None:
        while (ping := self._next_ping()) is not None:
            if not ping.set_running_or_notify_cancel():
                continue
            if error is None:
                ping.set_result(None)
            else:
                ping.set_exception(error)

    def _next_ping(self) -> "Future[None] | None":
        """Take the oldest; at the end the thread and those who ping take them both."""
        try:
            return self._pings.popleft()
        except IndexError:
            return None


class _GuardedRun:
    """Runs pieces together, and remembers how many tokens were too many at once."""

    def __init__(self, classifier: Classifier) -> None:
        self.num_tokens_too_many = 0
        self._classifier = classifier
        self._is_first = True

    def __call__(self, pieces: Iterable[_Piece]) -> torch.Tensor:
        sequences = [piece.token_ids for piece in pieces]
        if not self._is_first:
            # Only here has the traceback let go of the tensors of the run that failed.
            release_cache(self._classifier.device)
        self._is_first = False
        try:
            return self._classifier(sequences)
        except Exception as error:
            if is_out_of_memory(error):
                num_tokens = sum(map(len, sequences))
                self.num_tokens_too_many = max(self.num_tokens_too_many, num_tokens)
            raise


class _Answer:
    """The answer to one job, until it is complete."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._found: dict[int, Probabilities] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still waits for it."""
        return not self._job.has_left and not self._job.answer.done()

    def note(self, index: int, outcome: Probabilities | Exception) -> None:
        """Add what became of one text; the first that failed ends the job."""
        if self._job.answer.done():
            return
        if isinstance(outcome, Exception):
            self._job.answer.set_exception(outcome)
            return
        self._found[index] = outcome
        if len(self._found) == len(self._job.sequences):
            self._job.answer.set_result([self._found[i] for i in range(len(self._found))])


def _failure(piece: _Piece, why: str) -> ClassificationFailedError:
    message = f"The model {why} on a text of {piece.num_tokens} tokens."
    return ClassificationFailedError(message, f"input[{piece.index}]")


def _dead() -> ReplicaUnavailableError:
    return ReplicaUnavailableError("The classifier's worker has ended; try again.")
