"""Answers the jobs of a pooler's queue with vLLM, as `deployments.pooling.pooling_worker` asks.

vLLM batches by itself. So that what waits can still be refused, little of it waits there: the
worker takes everything in the queue whenever vLLM has less than a step's tokens to do. A job's
texts run together, and the first that fails ends its job and no other.

vLLM's front end runs on an event loop of the worker's thread; `pooled_engine` is vLLM as this
module sees it.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch

from deployments.contract.errors import PoolingFailedError, ReplicaUnavailableError
from deployments.contract.pooling import ROW_DTYPE
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.pooling.pooling_worker import BatchStats
from deployments.pooling.request_queue import Job, RequestQueue, Row, TokenIds
from deployments.vllm_engine.watches import LOOK_S


class EngineLostError(Exception):
    """vLLM's processes have ended."""


class PooledEngine(Protocol):
    """A model that runs on vLLM; all coroutines run on one event loop."""

    @property
    def max_batched_tokens(self) -> int:
        """The most tokens of a step."""
        ...

    @property
    def probe(self) -> TokenIds:
        """A short text that the model accepts."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether vLLM's processes have ended."""
        ...

    async def check_task(self) -> None:
        """Raise unless the model does its task.

        Raises:
            UnsupportedModelError: It does not, on vLLM.
        """
        ...

    async def compute(self, token_ids: TokenIds, type_ids: TokenIds | None) -> torch.Tensor:
        """Return the row that answers a text, [width], float32, on the CPU.

        Raises:
            EngineLostError: vLLM's processes have ended.
            Exception: The text fails by itself.
        """
        ...

    def note_begin(self) -> None:
        """Note that there was nothing to do until now."""
        ...

    def is_hung(self) -> bool:
        """Return whether vLLM, which has work, can only hang."""
        ...

    def shutdown(self) -> None:
        """End vLLM's processes, whatever they do."""
        ...


class VllmWorker:
    """Answers the requests of a queue; see `PoolingWorker`.

    Attributes:
        num_batches: Number of times that texts were done, probes included.
        failure: What has ended the worker.
    """

    def __init__(
        self,
        open_engine: Callable[[], PooledEngine],
        queue: RequestQueue,
        on_batch: Callable[[BatchStats], None],
    ) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            open_engine: Starts vLLM; called once, on the thread.
            queue: The waiting requests; the worker closes the queue when it ends.
            on_batch: Called on the thread with the texts that were done together.
        """
        self.num_batches = 0
        self.failure: BaseException | None = None
        self._open_engine = open_engine
        self._queue = queue
        self._on_batch = on_batch
        self._opened: Future[PooledEngine] = Future()
        self._thread = threading.Thread(target=self._run, name="pooler", daemon=True)
        self._num_running = self._num_running_tokens = 0
        self._done: list[int] = []
        self._is_reporting = False
        self._is_hung = False

    def start(self) -> Future[PooledEngine]:
        """Start the thread; the future holds vLLM, or the error of starting it."""
        self._thread.start()
        return self._opened

    def stop(self) -> None:
        """End vLLM; unfinished requests fail."""
        self.abandon()
        if self._thread.is_alive():
            self._thread.join()

    def abandon(self) -> None:
        """Fail all requests and pings and accept no more; vLLM ends, whatever it does."""
        self._queue.close()
        if self._opened.done() and self._opened.exception() is None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._has_room.set)

    @property
    def is_alive(self) -> bool:
        """Whether waiting requests will be answered."""
        has_ended = self._queue.is_closed or not self._thread.is_alive()
        return not has_ended and not self._opened.result().is_lost

    @property
    def is_stuck(self) -> bool:
        """Whether vLLM hangs; the worker has ended itself by then."""
        return self._is_hung

    def ping(self) -> Future[None]:
        """Return a future that the next text completes; an idle vLLM runs a probe."""
        ping = self._ping()
        try:
            return asyncio.run_coroutine_threadsafe(ping, self._loop)
        except RuntimeError:  # the loop has ended
            ping.close()
            failed: Future[None] = Future()
            failed.set_exception(_dead())
            return failed

    async def sleep(self) -> bool:
        """Stay awake: vLLM's memory is given back only with its processes."""
        return False

    async def wake(self) -> None:
        """Do nothing: it has stayed awake."""

    def _run(self) -> None:
        try:
            engine = self._open_engine()
        except BaseException as error:  # noqa: BLE001 - the future passes it on
            self._queue.close()
            self._opened.set_exception(error)
            return
        try:
            asyncio.run(self._serve(engine))
        except BaseException as error:  # noqa: BLE001 - the future or `failure` passes it on
            self.failure = error
        self._queue.close()
        self._queue.fail_all(_dead())
        engine.shutdown()
        if not self._opened.done():
            self._opened.set_exception(self.failure or _dead())

    async def _serve(self, engine: PooledEngine) -> None:
        """Run jobs until the queue is closed; what then runs is cancelled with the loop."""
        self._loop = asyncio.get_running_loop()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._advanced = asyncio.Event()
        await self._try(engine)
        self._opened.set_result(engine)
        watching = self._loop.create_task(self._watch(engine))
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="pooler-queue") as taker:
            try:
                while True:
                    jobs = await self._loop.run_in_executor(taker, self._queue.take_all)
                    if jobs is None:
                        return
                    for job in jobs:
                        self._begin(engine, job)
                    await self._has_room.wait()
            finally:
                watching.cancel()
                self._queue.close()  # or the thread that takes from it would wait for ever

    async def _try(self, engine: PooledEngine) -> None:
        """Run a short text, so that errors show at the start.

        Raises:
            UnsupportedModelError: The model does not do its task on vLLM, or fails on the text.
        """
        await engine.check_task()
        try:
            await self._begin_text(engine, 0, engine.probe)
        except PoolingFailedError as error:
            raise UnsupportedModelError(error.message) from error.__cause__

    async def _watch(self, engine: PooledEngine) -> None:
        """End all jobs once vLLM can only hang, so that they run elsewhere."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._num_running and engine.is_hung():
                self._is_hung = True
                self._end(TimeoutError("a step of vLLM hangs"))
                return

    def _end(self, failure: BaseException) -> None:
        """Take no more jobs; those that run fail when the loop ends."""
        self.failure = failure
        self._queue.close()
        self._has_room.set()

    def _begin(self, engine: PooledEngine, job: Job) -> None:
        """Hand a job's texts to vLLM."""
        types = job.type_ids or (None,) * len(job.sequences)
        texts = [
            self._begin_text(engine, index, token_ids, type_ids)
            for index, (token_ids, type_ids) in enumerate(zip(job.sequences, types, strict=True))
        ]
        answer = self._loop.create_task(self._answer(job, texts))
        answer.add_done_callback(lambda _: [text.cancel() for text in texts])
        job.on_leave = partial(self._cancel, answer)
        if job.has_left:  # before it could be told
            answer.cancel()

    def _cancel(self, answer: "asyncio.Task[None]") -> None:
        """Drop a job whose client has left; runs on the client's thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(answer.cancel)

    async def _answer(self, job: Job, texts: "Sequence[asyncio.Task[Row]]") -> None:
        """Answer a job once all its texts are done, or one has failed."""
        try:
            rows = await asyncio.gather(*texts)
        except PoolingFailedError as error:
            job.answer.set_exception(error)
        except EngineLostError as error:
            self._end(error)
        else:
            job.answer.set_result(rows)

    def _begin_text(
        self,
        engine: PooledEngine,
        index: int,
        token_ids: TokenIds,
        type_ids: TokenIds | None = None,
    ) -> "asyncio.Task[Row]":
        if not self._num_running:
            engine.note_begin()
        self._num_running += 1
        self._num_running_tokens += len(token_ids)
        if self._num_running_tokens >= engine.max_batched_tokens:
            self._has_room.clear()
        text = self._loop.create_task(self._row(engine, index, token_ids, type_ids))
        # A callback, since a task that is cancelled before it begins runs no `finally`.
        text.add_done_callback(partial(self._note_end, engine, len(token_ids)))
        return text

    def _note_end(self, engine: PooledEngine, num_tokens: int, text: "asyncio.Task[Row]") -> None:
        self._num_running -= 1
        self._num_running_tokens -= num_tokens
        if self._num_running_tokens < engine.max_batched_tokens:
            self._has_room.set()
        if text.cancelled():
            if not self._num_running:
                self._wake_pings()
            return
        if not self._is_reporting:
            # All texts of a step end in one round of the loop: report them together.
            self._is_reporting = True
            self._loop.call_soon(self._report)
        if text.exception() is None:
            self._done.append(num_tokens)

    def _report(self) -> None:
        self._is_reporting = False
        done, self._done = self._done, []
        self.num_batches += 1
        self._wake_pings()
        self._on_batch(BatchStats(len(done), sum(done)))

    def _wake_pings(self) -> None:
        self._advanced.set()
        self._advanced.clear()

    async def _row(
        self, engine: PooledEngine, index: int, token_ids: TokenIds, type_ids: TokenIds | None
    ) -> Row:
        """Return the row of one text.

        Raises:
            PoolingFailedError: The text fails by itself.
            EngineLostError: vLLM's processes have ended.
        """
        try:
            row = await engine.compute(token_ids, type_ids)
        except EngineLostError:
            raise
        except Exception as error:
            raise _failure(index, token_ids, "failed") from error
        if not row.isfinite().all():
            raise _failure(index, token_ids, "gave no finite numbers")
        return row.numpy().astype(ROW_DTYPE, copy=False).tobytes()

    async def _ping(self) -> None:
        if self._queue.is_closed:
            raise _dead()
        num_batches = self.num_batches
        while self._num_running:
            await self._advanced.wait()
            if self.num_batches > num_batches:
                return
        # All that ran was cancelled, or nothing did.
        engine = self._opened.result()
        try:
            await self._begin_text(engine, 0, engine.probe)
        except PoolingFailedError as error:
            why = "The model's device failed a probe."
            raise ReplicaUnavailableError(why) from error
        except EngineLostError as error:
            self._end(error)
            raise _dead() from error


def _failure(index: int, token_ids: TokenIds, why: str) -> PoolingFailedError:
    message = f"The model {why} on a text of {len(token_ids)} tokens."
    return PoolingFailedError(message, f"input[{index}]")


def _dead() -> ReplicaUnavailableError:
    return ReplicaUnavailableError("The model's worker has ended; try again.")
