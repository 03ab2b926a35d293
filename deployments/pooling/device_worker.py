"""The threads that own the device: each runs one lane of micro-batches.

A free lane takes its part of everything that waits (`lanes` has the rule). Nothing waits for a
timeout, and batches grow with the load. All lanes use one model.

A micro-batch that runs alone, on all compute threads, runs on the thread that has loaded the model.
Each thread that computes on several has a pool of them, and as soon as pools have more threads than
there are cores, libgomp no longer lets them spin before they sleep: each operator then wakes them,
which took a text of 60 tokens from 23 ms to 37.

A micro-batch that fails is bisected, and only texts that fail by themselves fail their requests. If
one runs out of memory, the following ones are smaller for a while.

On a CPU the model may sleep and wake between two micro-batches (`DeviceWorker.sleep`). One that
can't wake has failed.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol

import torch

from deployments.compute.bisection import Bisection
from deployments.compute.device_errors import is_fatal, is_out_of_memory, release_cache
from deployments.compute.host_memory import trim_freed_memory
from deployments.compute.speedups import StoredWeights
from deployments.compute.token_budget import TokenBudget
from deployments.compute.work_watch import WorkWatch
from deployments.contract.errors import PoolingFailedError, ReplicaUnavailableError
from deployments.contract.pooling import ROW_DTYPE
from deployments.contract.unsupported_model import reason_of
from deployments.pooling.lanes import EncodedText, Lanes, LaneWork
from deployments.pooling.pooling_worker import BatchStats
from deployments.pooling.request_queue import RequestQueue, Row, TokenIds

logger = logging.getLogger(__name__)


class Pooler(Protocol):
    """A model as the worker sees it."""

    @property
    def device(self) -> torch.device:
        """The device that the model runs on."""
        ...

    @property
    def model(self) -> torch.nn.Module:
        """The module that holds its weights; on a CPU, they lie in no mapped file."""
        ...

    @property
    def is_padded(self) -> bool:
        """Whether each sequence of a batch costs as much as the longest."""
        ...

    @property
    def num_lanes(self) -> int:
        """The most threads that may call it at once."""
        ...

    @property
    def probe(self) -> TokenIds:
        """A short text that an idle device runs to show that it works."""
        ...

    @property
    def max_batched_tokens(self) -> int:
        """The most tokens of a micro-batch; a longer text runs by itself."""
        ...

    @property
    def max_batch_s(self) -> float:
        """Seconds after which a micro-batch can only hang."""
        ...

    def __call__(
        self, sequences: Sequence[TokenIds], type_ids: Sequence[TokenIds | None] = ()
    ) -> torch.Tensor:
        """Return a row for each sequence, [len(sequences), width], float32, on the CPU.

        A row is not finite if the model's numbers for its text are not. `type_ids` say which of a
        pair's texts each token belongs to; see `PoolingModel`.
        """
        ...


class DeviceWorker:
    """Answers the requests of a queue.

    Attributes:
        num_batches: Number of micro-batches so far, probes included.
        failure: What has ended a lane, and with it the worker.
    """

    def __init__(
        self,
        make_pooler: Callable[[], Pooler],
        queue: RequestQueue,
        on_batch: Callable[[BatchStats], None],
    ) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            make_pooler: Called once, on the thread; it sets how many threads torch computes
                with.
            queue: The waiting requests; the worker closes the queue when it ends.
            on_batch: Called after each micro-batch on its thread, never concurrently.
        """
        self.num_batches = 0
        self.failure: BaseException | None = None
        self._make_pooler = make_pooler
        self._queue = queue
        self._budget: TokenBudget  # once the model is made, like the next two
        self._lanes: Lanes
        self._weights: StoredWeights
        self._on_batch = on_batch
        self._lock = threading.Lock()
        self._pings: deque[Future[None]] = deque()
        self._watch = WorkWatch()
        self._is_abandoned = False
        self._pooler: Future[Pooler] = Future()
        self._alone: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pooler", daemon=True)

    def start(self) -> "Future[Pooler]":
        """Start the first thread; the future holds the model, or the error of loading it."""
        self._thread.start()
        return self._pooler

    def stop(self) -> None:
        """Stop all threads after their current micro-batches; unfinished requests fail."""
        self._queue.close()
        if self._thread.is_alive() and not self._is_abandoned:
            self._thread.join()

    def abandon(self) -> None:
        """Fail all requests and pings and accept no more, while a micro-batch hangs.

        The threads are left as they are; only the end of the process frees what they hold.
        """
        self._is_abandoned = True
        self._queue.close()
        self._queue.fail_all(_dead())
        self._answer_pings(_dead())

    @property
    def is_stuck(self) -> bool:
        """Whether a micro-batch has run for longer than any can take."""
        made = self._pooler
        return made.done() and self._watch.longest_s > made.result().max_batch_s

    @property
    def is_alive(self) -> bool:
        """Whether waiting requests will be answered."""
        return self._thread.is_alive() and not self._queue.is_closed

    def ping(self) -> "Future[None]":
        """Return a future that the next micro-batch completes; an idle device runs a probe."""
        pinged: Future[None] = Future()
        self._pings.append(pinged)
        self._queue.poke()
        # The thread closes the queue before it answers the last pings, so no ping is lost.
        if self._queue.is_closed:
            self._answer_pings(_dead())
        return pinged

    async def sleep(self) -> bool:
        """Give back the weights' memory, on a CPU, once no micro-batch runs; all else stays.

        Tensors keep their addresses, so a trace stays valid, too. Pings that come after it are
        answered without a probe.

        Returns:
            Whether it sleeps: not if the weights can't be written to a disk.

        Raises:
            ReplicaUnavailableError: The worker has ended.
        """
        self._require_open()
        return await asyncio.to_thread(self._give_back, self._pooler.result().max_batch_s)

    async def wake(self) -> None:
        """Read the weights again; if that fails, the worker has failed.

        Raises:
            ReplicaUnavailableError: They can't be read, and why; or the worker has ended.
        """
        self._require_open()
        try:
            await asyncio.to_thread(self._weights.fill)
        except Exception as error:
            self.failure = error
            self._queue.close()
            why = f"The model could not be woken: {reason_of(error)}"
            raise ReplicaUnavailableError(why) from error

    def _require_open(self) -> None:
        if self._queue.is_closed:
            raise _dead()

    def _give_back(self, timeout_s: float) -> bool:
        """Give the weights back; runs on a thread of its own, since lanes wait for texts."""
        with self._lanes.held_up(timeout_s) as is_idle:
            if not is_idle:
                return False
            try:
                self._weights.give_back()
            except (OSError, RuntimeError) as error:
                logger.warning("the model can't sleep: its weights can't be written: %s", error)
                return False
        trim_freed_memory()
        return True

    def _run(self) -> None:
        try:
            pooler = self._make_pooler()
        except BaseException as error:  # noqa: BLE001 - the future passes it on
            self._queue.close()
            self._pooler.set_exception(error)
            self._answer_pings(_dead())
            return
        self._budget = TokenBudget(pooler.max_batched_tokens)
        self._weights = StoredWeights(pooler.model)
        lanes = self._lanes = Lanes(
            self._queue,
            self._budget,
            pooler.num_lanes,
            is_padded=pooler.is_padded,
            share_threads=pooler.device.type == "cpu",
        )
        self._pooler.set_result(pooler)
        if pooler.num_lanes == 1:
            self._run_lane(pooler, lanes, self._run_work)
        else:
            threads = [self._lane(i, pooler, lanes) for i in range(pooler.num_lanes)]
            for _ in threads:
                while (run := self._alone.get()) is not None:  # a lane that has ended puts None
                    run()
            for thread in threads:
                thread.join()
        self._queue.fail_all(_dead())
        self._answer_pings(_dead())

    def _lane(self, number: int, pooler: Pooler, lanes: Lanes) -> threading.Thread:
        def run() -> None:
            self._run_lane(pooler, lanes, self._run_here_or_alone)
            self._alone.put(None)

        thread = threading.Thread(target=run, name=f"pooler-{number}", daemon=True)
        thread.start()
        return thread

    def _run_here_or_alone(self, pooler: Pooler, work: LaneWork) -> None:
        """Run a micro-batch on this thread, or on the first one if it has all compute threads."""
        if not work.is_alone:
            self._run_work(pooler, work)
            return
        done: Future[None] = Future()

        def run() -> None:
            try:
                self._run_work(pooler, work)
            except BaseException as error:  # noqa: BLE001 - the future passes it on
                done.set_exception(error)
            else:
                done.set_result(None)

        self._alone.put(run)
        done.result()

    def _run_lane(
        self, pooler: Pooler, lanes: Lanes, run_work: Callable[[Pooler, LaneWork], None]
    ) -> None:
        """Run micro-batches until the queue is closed; close it if one stops the thread."""
        try:
            while (work := lanes.take()) is not None:
                try:
                    with self._watch.working():
                        run_work(pooler, work)
                finally:
                    lanes.give_back(work)
        except BaseException as error:  # noqa: BLE001 - `failure` passes it on
            self.failure = error
        self._queue.close()

    def _run_work(self, pooler: Pooler, work: LaneWork) -> None:
        """Run a micro-batch, and answer each job whose last text it completes."""
        torch.set_num_threads(work.num_threads)  # only for this thread
        if work.texts:
            assert not self._weights.is_given_back, "its weights are not there"
            for text, outcome in self._run_batch(pooler, work.texts):
                text.answer.note(text.index, outcome)
            num_tokens = sum(text.num_tokens for text in work.texts)
            self._note_batch(BatchStats(len(work.texts), num_tokens))
        elif self._pings:  # no micro-batch has answered them, e.g. because all clients have left
            self._probe(pooler)

    def _probe(self, pooler: Pooler) -> None:
        """Run the probe text and answer the pings; one that sleeps has nothing to run it with.

        Raises:
            torch.AcceleratorError: The device is lost.
        """
        if self._weights.is_given_back:
            self._answer_pings(None)
            return
        try:
            pooler([pooler.probe])
        except Exception as error:
            if is_fatal(error):
                raise
            logger.warning("the device failed a probe", exc_info=True)
            self._answer_pings(ReplicaUnavailableError("The model's device failed a probe."))
            return
        self._note_batch(BatchStats(0, 0))

    def _run_batch(
        self, pooler: Pooler, batch: list[EncodedText]
    ) -> Iterator[tuple[EncodedText, Row | Exception]]:
        """Yield the row of each text of a micro-batch, or its error.

        Raises:
            torch.AcceleratorError: The device is lost; no text is at fault.
        """
        run = _GuardedRun(pooler)
        bisection = Bisection[EncodedText, torch.Tensor]("a micro-batch", run)
        bisection.run(batch)
        with self._lock:
            if run.num_oom_tokens:
                self._budget.shrink(run.num_oom_tokens)
            else:
                self._budget.note_good_step()
        for texts, rows in bisection.ran:
            finite = rows.isfinite().all(dim=1).tolist()
            numbers = rows.numpy().astype(ROW_DTYPE, copy=False)
            for text, row, is_finite in zip(texts, numbers, finite, strict=True):
                yield text, row.tobytes() if is_finite else _failure(text, "gave no finite numbers")
        for failure in bisection.failures:
            why = "has not enough memory" if failure.is_out_of_memory else "failed"
            yield failure.item, _failure(failure.item, why)

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
        """Take the oldest ping; once the queue is closed, both the worker and `ping` do so."""
        try:
            return self._pings.popleft()
        except IndexError:
            return None


class _GuardedRun:
    """Runs texts together, and remembers the largest number of tokens that ran out of memory."""

    def __init__(self, pooler: Pooler) -> None:
        self.num_oom_tokens = 0
        self._pooler = pooler
        self._is_first = True

    def __call__(self, texts: Iterable[EncodedText]) -> torch.Tensor:
        batch = list(texts)
        sequences = [text.token_ids for text in batch]
        if not self._is_first:
            # The failed run's traceback, which held its tensors, has been released only by now.
            release_cache(self._pooler.device)
        self._is_first = False
        try:
            return self._pooler(sequences, [text.type_ids for text in batch])
        except Exception as error:
            if is_out_of_memory(error):
                num_tokens = sum(map(len, sequences))
                self.num_oom_tokens = max(self.num_oom_tokens, num_tokens)
            raise


def _failure(text: EncodedText, why: str) -> PoolingFailedError:
    message = f"The model {why} on a text of {text.num_tokens} tokens."
    return PoolingFailedError(message, f"input[{text.index}]")


def _dead() -> ReplicaUnavailableError:
    return ReplicaUnavailableError("The model's worker has ended; try again.")
