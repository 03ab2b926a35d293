"""The threads that own the device: one lane of micro-batches each.

A lane that is free takes its share of all that waits (`shares` has the rule): nothing waits for a
timeout, and batches grow with the load by themselves. The model is made on the first lane's thread
and all lanes use it.

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

from deployments.classifier.pieces import Piece
from deployments.classifier.shares import Share, Shares
from deployments.classifier.waiting_line import Probabilities, TokenIds, WaitingLine
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
    def num_lanes(self) -> int:
        """How many threads may call it at once."""
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
            make_classifier: Called once, on the thread; sets how many threads torch computes with.
            line: Where requests wait; the worker closes it when it ends.
            max_batched_tokens: Most tokens of a micro-batch, unless one text alone has more.
            on_batch: Called after each micro-batch on its thread, never twice at once.
        """
        self.num_batches = 0
        self._make_classifier = make_classifier
        self._line = line
        self._budget = StepBudget(max_batched_tokens)
        self._on_batch = on_batch
        self._lock = threading.Lock()
        self._pings: deque[Future[None]] = deque()
        self._classifier: Future[Classifier] = Future()
        self._thread = threading.Thread(target=self._run, name="classifier", daemon=True)

    def start(self) -> "Future[Classifier]":
        """Start the first thread; the future holds the model, or why it could not be made."""
        self._thread.start()
        return self._classifier

    def stop(self) -> None:
        """End all threads after the micro-batches that run now; unfinished requests fail."""
        self._line.close()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether what waits will be classified."""
        return self._thread.is_alive() and not self._line.is_closed

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
        shares = Shares(
            self._line, self._budget, classifier.num_lanes, is_padded=classifier.is_padded
        )
        self._classifier.set_result(classifier)
        lanes = [self._further_lane(i, classifier, shares) for i in range(1, classifier.num_lanes)]
        self._run_lane(classifier, shares)
        for lane in lanes:
            lane.join()
        self._line.fail_all(_dead())
        self._answer_pings(_dead())

    def _further_lane(
        self, number: int, classifier: Classifier, shares: Shares
    ) -> threading.Thread:
        thread = threading.Thread(
            target=self._run_lane,
            args=(classifier, shares),
            name=f"classifier-{number}",
            daemon=True,
        )
        thread.start()
        return thread

    def _run_lane(self, classifier: Classifier, shares: Shares) -> None:
        """Compute shares until the line is closed; close it if that fails."""
        try:
            while (share := shares.take()) is not None:
                try:
                    self._run_share(classifier, share)
                finally:
                    shares.give_back(share)
        except BaseException:
            logger.exception("a classifier's thread failed; the replica must be replaced")
        self._line.close()

    def _run_share(self, classifier: Classifier, share: Share) -> None:
        """Classify a micro-batch, and answer each job whose last text is done with it."""
        torch.set_num_threads(share.num_threads)  # of this thread alone
        if share.pieces:
            for piece, outcome in self._run_batch(classifier, share.pieces):
                piece.answer.note(piece.index, outcome)
            num_tokens = sum(piece.num_tokens for piece in share.pieces)
            self._note_batch(BatchStats(len(share.pieces), num_tokens))
        elif self._pings:  # no micro-batch has answered them; perhaps all clients have left
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

    def _run_batch(
        self, classifier: Classifier, batch: list[Piece]
    ) -> Iterator[tuple[Piece, Probabilities | Exception]]:
        """Yield what became of each text of a micro-batch.

        Raises:
            torch.AcceleratorError: The device is gone; no text is to blame.
        """
        run = _GuardedRun(classifier)
        isolation = Isolation[Piece, torch.Tensor]("a micro-batch", run)
        isolation.run(batch)
        with self._lock:
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
        with self._lock:
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

    def __call__(self, pieces: Iterable[Piece]) -> torch.Tensor:
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


def _failure(piece: Piece, why: str) -> ClassificationFailedError:
    message = f"The model {why} on a text of {piece.num_tokens} tokens."
    return ClassificationFailedError(message, f"input[{piece.index}]")


def _dead() -> ReplicaUnavailableError:
    return ReplicaUnavailableError("The classifier's worker has ended; try again.")
