"""TextPooler: a model on the device's own worker, as a Serve deployment.

The worker takes everything in the queue whenever the device is free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from deployments.contract.model_spec import NO_POOLER_SLEEP_ON_GPU, number
from deployments.replica.lean_imports import lean_imports

with lean_imports():
    from deployments.compute.device_errors import is_of_device
    from deployments.compute.work_watch import max_work_s
    from deployments.contract.pooling import PoolingRequest, TextPair
    from deployments.contract.telemetry.start_progress import StartProgress
    from deployments.contract.unsupported_model import UnsupportedModelError
    from deployments.device.device import MemoryDevice
    from deployments.plan.memory_budget import GIB
    from deployments.plan.replica_plan import ReplicaPlan
    from deployments.plan.replica_report import MeasuredMemory, MemoryPlan
    from deployments.pooler_replica import PoolerReplica
    from deployments.pooling.device_worker import DeviceWorker
    from deployments.pooling.embedder import Embedder
    from deployments.pooling.lanes import choose_num_lanes
    from deployments.pooling.model_loader import LoadedPooler, load_pooler
    from deployments.pooling.model_outline import load_config
    from deployments.pooling.pooling_model import Layout, PoolingModel
    from deployments.pooling.pooling_worker import PoolerFacts, PoolingWorker
    from deployments.pooling.request_queue import TokenIds
    from deployments.pooling.text_encoder import EncodedTexts, TextEncoder
    from deployments.replica.device_share import (
        load_onto_share,
        log_sizes,
        measure_memory,
        plan_share,
        require_memory,
    )
    from deployments.replica.start_phases import EndPhase

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
        measured: What the start has measured of the device's memory; None on a CPU.
    """

    pooler: PoolingModel
    loaded: LoadedPooler
    plan: ReplicaPlan
    num_threads: int
    measured: MeasuredMemory | None = None

    @property
    def facts(self) -> PoolerFacts:
        """What the replica is told of its model."""
        loaded, plan = self.loaded, self.plan
        return PoolerFacts(
            model=loaded.model,
            tokenizer=loaded.tokenizer,
            max_model_len=loaded.max_model_len,
            reads_types=loaded.reads_types,
            memory=MemoryPlan.of(plan, self.measured),
            num_parameters=plan.shape.weights.total,
            dtype=plan.dtype,
            num_threads=self.num_threads,
            summary=self.summary,
            attention=self._attention,
        )

    @property
    def _attention(self) -> str:
        """How attention reads texts, in words."""
        is_flash = self.pooler.layout == "packed" and not self.plan.device.on_cpu
        return f"texts {LAYOUTS[self.pooler.layout]}" + (", flash attention" if is_flash else "")

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


class TextPooler(PoolerReplica):
    """Answers texts with one model, whose micro-batches run on threads of this process."""

    _placed: PlacedPooler
    _plan: ReplicaPlan

    def _open_worker(self) -> PoolingWorker:
        spec = self._spec
        if (
            number(spec.entry.light_sleep_after_s) is not None
            and self._device.torch_device.type != "cpu"
        ):
            raise UnsupportedModelError(NO_POOLER_SLEEP_ON_GPU)
        config = load_config(spec.source, revision=spec.entry.revision)
        self._plan = plan_share(spec, config, self._device, is_pooler=True)
        log_sizes(self._plan)
        self._device_worker = DeviceWorker(self._place, self._queue, self._hand_over)
        return self._device_worker

    def _start_worker(self) -> PoolerFacts:
        self._device_worker.start().result()
        return self._placed.facts

    def _place(self) -> PoolingModel:
        """Make the model; runs on the worker's thread."""
        self._placed = place_pooler(self._plan, self._device, self._phases.end, self._progress)
        return self._placed.pooler


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
    entry, source = plan.spec.entry, plan.spec.source
    load = partial(
        load_pooler,
        source,
        task=entry.task,
        revision=entry.revision,
        dtype=plan.dtype,
        device=device.torch_device,
        max_model_len=plan.sizes.max_model_len,
    )
    loaded, plan, num_threads = load_onto_share(
        plan, device, load, end_phase, progress, LARGE_MODEL_BYTES
    )
    if loaded.layout != "packed" and entry.max_batched_tokens == "auto":
        plan = plan.for_unpacked_texts()
        log_sizes(plan)
    max_batched_tokens = plan.sizes.max_batched_tokens
    num_lanes = choose_num_lanes(loaded.model, device.torch_device, num_threads)
    # A lane of a GPU waits for the batch before its own, too.
    num_batches = 1 if device.torch_device.type == "cpu" else num_lanes
    max_batch_s = num_batches * max_work_s(
        loaded.num_weight_bytes,
        max(max_batched_tokens, loaded.max_model_len),
        device.torch_device.type,
    )
    probe = loaded.probes.of_length(1)
    pooler = PoolingModel(
        loaded.model,
        loaded.layout,
        probe,
        num_lanes,
        max_batch_s,
        max_batched_tokens=max_batched_tokens,
    )
    with require_memory(plan):
        warm_up(pooler, loaded, source)
    end_phase("warm-up")
    measured = measure_memory(device, loaded.num_weight_bytes)
    return PlacedPooler(pooler, loaded, plan, num_threads, measured)


def warm_up(pooler: PoolingModel, loaded: LoadedPooler, source: str) -> None:
    """Run the shortest text, the largest micro-batch and, with one label, a pair of texts.

    Args:
        pooler: The model.
        loaded: The loaded model that it was made from.
        source: Names it in errors.

    Raises:
        UnsupportedModelError: The model fails on one of them, or gives no finite numbers.
    """
    longest = loaded.probes.of_length(loaded.max_model_len)
    num_longest = max(1, pooler.max_batched_tokens // len(longest))
    for sequences in ((pooler.probe,), (longest,) * num_longest):
        _try(pooler, loaded, source, f"a text of {len(sequences[0])} tokens", sequences)
    if len(loaded.labels) != 1:
        return
    encoder = TextEncoder(loaded.tokenizer, loaded.max_model_len, reads_types=loaded.reads_types)
    (encoded,) = encoder.encode([PoolingRequest("warm-up", (TextPair("a", "b"),), truncate=True)])
    if not isinstance(encoded, EncodedTexts):
        raise UnsupportedModelError(f"{source!r} can't read a pair of texts: {encoded}")
    _try(pooler, loaded, source, "a pair of texts", encoded.token_ids, encoded.type_ids)


def _try(
    pooler: PoolingModel,
    loaded: LoadedPooler,
    source: str,
    what: str,
    sequences: Sequence[TokenIds],
    type_ids: Sequence[TokenIds | None] = (),
) -> None:
    try:
        rows = pooler(sequences, type_ids)
    except Exception as error:
        if is_of_device(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise UnsupportedModelError(f"{source!r} fails on {what}: {reason}") from error
    if not rows.isfinite().all():
        dtype = str(loaded.model.dtype).removeprefix("torch.")
        raise UnsupportedModelError(
            f"{source!r} gives no finite numbers; try another dtype than {dtype}"
        )
