"""TextPooler: a device's worker behind one method, as a Serve deployment.

Requests that arrive together are tokenized together (`@serve.batch`) and queued for the device's
worker (`deployments.pooling`), which takes everything in the queue whenever the device is free.
A cancelled request leaves the queue, and its unfinished results are dropped.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ray import serve

from deployments.autoscaling import ReplicaLoad
from deployments.compute.work_watch import is_hung, max_work_s
from deployments.contract.descriptions import PoolerDescription
from deployments.contract.errors import REFUSALS, RaystreamError, ReplicaUnavailableError
from deployments.contract.gen_ai_spans import end, recorded
from deployments.contract.generation import Refused, Started
from deployments.contract.pooling import Pooled, PooledText, PoolingEvent, PoolingRequest
from deployments.contract.telemetry.metric_table import POOLER
from deployments.contract.telemetry.start_progress import StartProgress
from deployments.contract.user_config import queue_limits, set_batching
from deployments.device.device import MemoryDevice
from deployments.plan.memory_budget import GIB
from deployments.plan.replica_plan import ReplicaPlan
from deployments.plan.replica_report import MemoryPlan, WorkCounts
from deployments.pooler_description import describe_model
from deployments.pooling.device_worker import BatchStats, DeviceWorker
from deployments.pooling.embedder import Embedder
from deployments.pooling.lanes import choose_num_lanes
from deployments.pooling.model_loader import LoadedPooler, load_config, load_pooler
from deployments.pooling.pooling_model import Layout, PoolingModel
from deployments.pooling.request_queue import Job, QueueLimits, RequestQueue
from deployments.pooling.text_encoder import EncodedTexts, TextEncoder
from deployments.pooling.warm_up import warm_up
from deployments.replica.device_share import load_onto_share, log_sizes, plan_share, require_memory
from deployments.replica.metrics import PoolerMetrics
from deployments.replica.model_replica import ModelReplica
from deployments.replica.probation import Probation
from deployments.replica.start_phases import EndPhase

MAX_BATCH_SIZE = 32
BATCH_WAIT_TIMEOUT_S = 0.0
"""Zero, because requests collect in the queue while the device is busy."""


LARGE_MODEL_BYTES = 32 * 2**20
"""From this size on, computing a text of a hundred tokens takes longer than its way over HTTP."""

LAYOUTS: Mapping[Layout, str] = {
    "packed": "packed without padding",
    "padded": "padded",
    "one by one": "run one by one",
}
"""Names of the layouts for the log."""


@dataclass(frozen=True, slots=True)
class PlacedPooler:
    """A pooler that is ready to run.

    Attributes:
        pooler: The model, warmed up.
        loaded: The loaded model that it was made from.
        plan: The sizes of the replica, and how its share of the device is divided.
        num_threads: Number of compute threads.
    """

    pooler: PoolingModel
    loaded: LoadedPooler
    plan: ReplicaPlan
    num_threads: int

    @property
    def memory(self) -> MemoryPlan:
        """The sizes of the replica, and how its memory was divided."""
        return MemoryPlan.of(self.plan)

    @property
    def num_parameters(self) -> int:
        """All weights; tied ones count once."""
        return self.plan.shape.weights.total

    @property
    def dtype(self) -> str:
        """Name of the type of the weights."""
        return self.plan.dtype

    @property
    def summary(self) -> str:
        """The log's description of the model: its lanes, dtype, weights, labels and layout."""
        model, num_labels = self.loaded.model, len(self.loaded.labels)
        outputs = (
            f"vectors of {model.width} numbers"
            if isinstance(model, Embedder)
            else f"{num_labels} labels"
        )
        return (
            f"{self.pooler.num_lanes} lane(s), {str(model.dtype).removeprefix('torch.')}, "
            f"{self.loaded.num_weight_bytes / GIB:.3f} GiB of weights, "
            f"{outputs}, texts of {self.loaded.max_model_len} tokens, "
            f"{LAYOUTS[self.pooler.layout]}; {self.plan.memory_summary}"
        )


class TextPooler(ModelReplica):
    """Answers texts with one model: scores of labels, or vectors."""

    _table = POOLER
    _placed: PlacedPooler

    def _start(self) -> None:
        spec = self._spec
        config = load_config(spec.source, revision=spec.entry.revision)
        self._plan = plan_share(spec, config, self._device, is_pooler=True)
        log_sizes(self._plan)
        self._queue = RequestQueue(QueueLimits(*self._queue_limits({})))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_batches_seen = 0
        self._worker = DeviceWorker(
            self._place, self._queue, self._plan.sizes.max_batched_tokens, self._hand_over
        )
        self._worker.start().result()
        self._facts, loaded = self._placed, self._placed.loaded
        vocab_size = loaded.model.config.get_text_config().vocab_size
        self._encoder = TextEncoder(
            loaded.tokenizer, loaded.max_model_len, vocab_size, reads_types=loaded.reads_types
        )
        self._metrics = PoolerMetrics(self._store, spec.id)
        self._suspects = asyncio.Lock()
        self._description = replace(describe_model(spec, loaded), footprint=self._footprint)

    def _place(self) -> PoolingModel:
        """Make the model; runs on the worker's thread."""
        self._placed = place_pooler(self._plan, self._device, self._phases.end, self._progress)
        return self._placed.pooler

    async def describe(self) -> PoolerDescription:
        """Return the description of this replica's model."""
        return self._description

    def _apply(self, given: Mapping[str, float]) -> None:
        self._queue.set_limits(QueueLimits(*self._queue_limits(given)))
        set_batching(self._encode, given, MAX_BATCH_SIZE, BATCH_WAIT_TIMEOUT_S)

    def _queue_limits(self, given: Mapping[str, float]) -> tuple[int, int | None]:
        return queue_limits(given, self._spec.entry, self._plan.sizes.max_model_len)

    async def _check_health(self) -> None:
        self._require_alive()
        is_idle = self._worker.num_batches == self._num_batches_seen
        if is_idle and await is_hung(self._worker, self.ping):
            raise ReplicaUnavailableError("A micro-batch hangs.")
        self._num_batches_seen = self._worker.num_batches

    @property
    def _is_dead(self) -> bool:
        return not self._worker.is_alive

    @property
    def _load(self) -> ReplicaLoad:
        running = self._queue.num_running_tokens / self._plan.sizes.max_batched_tokens
        return ReplicaLoad(
            running=min(1.0, running),
            refused=min(1.0, self._queue.refused),
            recent=self._was_used,
            waiting_tokens=self._queue.num_waiting_tokens,
        )

    @property
    def _work(self) -> WorkCounts:
        return WorkCounts(self._queue.num_running, self._queue.num_waiting)

    def _require_alive(self) -> None:
        if not self._worker.is_alive:
            why = "The model's worker has ended."
            raise ReplicaUnavailableError(why) from self._worker.failure

    async def ping(self) -> None:
        """Wait until the device has run a micro-batch; an idle device gets a short text.

        Raises:
            RaystreamError: The worker is broken.
        """
        await asyncio.wrap_future(self._worker.ping())

    async def pool(self, request: PoolingRequest) -> Pooled | Refused:
        """Return the model's result for each text, or `Refused`.

        Raises:
            RaystreamError: The request has failed, and not by its client's fault.
        """
        self._note_use()
        began_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        with recorded(None if self._spans is None else self._spans.of_texts(request)) as span:
            try:
                with self._queue.place() as job:
                    pooled = await self._pool(request, job)
            except REFUSALS as error:
                end(span, error)
                return Refused(error, self._replica_id)
            if span is not None and job.taken_s is not None:
                span.accepted(job.num_tokens)
                span.waited(job.taken_s - began_s)
        self._metrics.observe_finish(duration_s=time.monotonic() - began_s + request.elapsed_s)
        return pooled

    async def pool_suspect(self, request: PoolingRequest) -> AsyncIterator[list[PoolingEvent]]:
        """Stream two lists: `Started` when this suspect's turn has come, then `pool`'s answer.

        The answer is missing if the ingress gives no go-ahead.

        Raises:
            RaystreamError: See `pool`.
        """
        async with Probation(self._suspects, request.num_deaths):
            self._require_alive()
            with self._channels.go_aheads.expect() as go_ahead:
                yield [Started(await self._channels.address(), go_ahead.number)]
                if not await go_ahead.is_given():
                    return
            answer = await self.pool(request)
        yield [answer]

    async def _pool(self, request: PoolingRequest, job: Job) -> Pooled:
        encoded = await self._encode(request)
        if isinstance(encoded, RaystreamError):
            raise encoded
        self._queue.put(job, encoded.token_ids, encoded.type_ids)
        self._metrics.count_prompt(job.num_tokens)
        rows = await asyncio.wrap_future(job.answer)
        parts = zip(rows, encoded.token_ids, encoded.are_truncated, strict=True)
        texts = (
            PooledText(row, len(token_ids), is_truncated) for row, token_ids, is_truncated in parts
        )
        return Pooled(tuple(texts), self._replica_id)

    @serve.batch(
        max_batch_size=MAX_BATCH_SIZE,
        batch_wait_timeout_s=BATCH_WAIT_TIMEOUT_S,
        max_concurrent_batches=16,
    )
    async def _encode(self, requests: list[PoolingRequest]) -> list[EncodedTexts | RaystreamError]:
        """Encode requests that arrived together, off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoding, self._encoder.encode, requests)

    def _hand_over(self, stats: BatchStats) -> None:
        """Have the event loop record a micro-batch; runs on the worker's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._observe, stats)

    def _observe(self, stats: BatchStats) -> None:
        self._metrics.observe_batch(num_sequences=stats.num_sequences, num_tokens=stats.num_tokens)
        self._metrics.observe_queue(
            num_running=self._queue.num_running, num_waiting=self._queue.num_waiting
        )

    def _stop(self) -> None:
        if hasattr(self, "_worker"):
            self._worker.stop()


def place_pooler(
    plan: ReplicaPlan,
    device: MemoryDevice,
    end_phase: EndPhase = lambda name: None,
    progress: StartProgress | None = None,
) -> PlacedPooler:
    """Load a model onto a device and warm it up, on the worker's thread.

    Args:
        plan: The sizes of the replica.
        device: The device.
        end_phase: Notes that a phase has ended.
        progress: Counts what is downloaded and loaded.

    Raises:
        UnsupportedModelError: The model can't be served; one line says why.
        DeviceMemoryError: The share of the device is too small.
    """
    entry, source, sizes = plan.spec.entry, plan.spec.source, plan.sizes
    load = partial(
        load_pooler,
        source,
        task=entry.task,
        revision=entry.revision,
        dtype=plan.dtype,
        device=device.torch_device,
        max_model_len=sizes.max_model_len,
    )
    loaded, plan, num_threads = load_onto_share(
        plan, device, load, end_phase, progress, LARGE_MODEL_BYTES
    )
    num_lanes = choose_num_lanes(loaded.model, device.torch_device, num_threads)
    max_batch_s = max_work_s(
        loaded.num_weight_bytes,
        max(sizes.max_batched_tokens, loaded.max_model_len),
        device.torch_device.type,
    )
    probe = loaded.probes.of_length(1)
    pooler = PoolingModel(loaded.model, loaded.layout, probe, num_lanes, max_batch_s)
    with require_memory(plan):
        warm_up(pooler, loaded, source, sizes.max_batched_tokens)
    end_phase("warm-up")
    return PlacedPooler(pooler, loaded, plan, num_threads)
