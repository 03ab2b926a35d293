"""A pooler on a replica's device, within its share.

It is made on the worker's thread (`deployments.pooling.device_worker`), whose number of compute
threads it sets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deployments.compute.device_errors import is_fatal, is_out_of_memory
from deployments.compute.work_watch import max_work_s
from deployments.contract.model_errors import UnsupportedModelError
from deployments.contract.pooling import PoolingRequest, TextPair
from deployments.contract.start_progress import StartPhase, StartProgress
from deployments.device.device import MemoryDevice
from deployments.plan.memory_budget import GIB
from deployments.plan.replica_plan import ReplicaPlan
from deployments.pooling.embedder import Embedder
from deployments.pooling.lanes import choose_num_lanes
from deployments.pooling.model_loader import LoadedPooler, load_pooler
from deployments.pooling.pooling_model import Layout, PoolingModel
from deployments.pooling.request_queue import TokenIds
from deployments.pooling.text_encoder import EncodedTexts, TextEncoder
from deployments.replica.device_share import (
    begin_loading,
    claim_share,
    require_memory,
    set_compute_threads,
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
    """

    pooler: PoolingModel
    loaded: LoadedPooler
    plan: ReplicaPlan
    num_threads: int

    @property
    def summary(self) -> str:
        """The log's description of the model: its lanes, dtype, weights, labels and layout."""
        return (
            f"{self.pooler.num_lanes} lane(s), "
            f"{str(self.loaded.model.dtype).removeprefix('torch.')}, "
            f"{self.loaded.num_weight_bytes / GIB:.3f} GiB of weights, "
            f"{_outputs(self.loaded)}, texts of {self.loaded.max_model_len} tokens, "
            f"{LAYOUTS[self.pooler.layout]}; {self.plan.memory_summary}"
        )


def place_pooler(
    plan: ReplicaPlan,
    device: MemoryDevice,
    end_phase: EndPhase = lambda name: None,
    progress: StartProgress | None = None,
) -> PlacedPooler:
    """Load a model onto a device and warm it up.

    Args:
        plan: The sizes of the replica.
        device: The device.
        end_phase: Notes that a phase has ended.
        progress: Counts what is downloaded and loaded.

    Raises:
        UnsupportedModelError: The model can't be served; one line says why.
        DeviceMemoryError: The share of the device is too small.
    """
    spec, sizes = plan.spec, plan.sizes
    claim_share(spec, device)
    begin_loading(spec, progress := progress or StartProgress())
    with require_memory(plan):
        loaded = load_pooler(
            spec.source,
            task=spec.task,
            revision=spec.revision,
            dtype=plan.dtype,
            device=device.torch_device,
            max_model_len=sizes.max_model_len,
        )
    end_phase("weights")
    progress.begin(StartPhase.WARMING_UP)
    num_threads = set_compute_threads(spec, loaded.num_weight_bytes, LARGE_MODEL_BYTES)
    probes = loaded.probes
    num_lanes = choose_num_lanes(loaded.model, device.torch_device, num_threads)
    max_batch_s = max_work_s(
        loaded.num_weight_bytes,
        max(sizes.max_batched_tokens, loaded.max_model_len),
        device.torch_device.type,
    )
    plan = plan.with_weights(loaded.num_weight_bytes, device.foreign_bytes)
    pooler = PoolingModel(loaded.model, loaded.layout, probes.of_length(1), num_lanes, max_batch_s)
    with require_memory(plan):
        _warm_up(pooler, probes.of_length(loaded.max_model_len), plan)
        if len(loaded.labels) == 1:
            _warm_up_pair(pooler, loaded, plan)
    end_phase("warm-up")
    return PlacedPooler(pooler, loaded, plan, num_threads)


def _outputs(loaded: LoadedPooler) -> str:
    if isinstance(loaded.model, Embedder):
        return f"vectors of {loaded.model.width} numbers"
    return f"{len(loaded.labels)} labels"


def _warm_up(pooler: PoolingModel, longest: TokenIds, plan: ReplicaPlan) -> None:
    """Run the shortest text and the largest micro-batch, so that errors show at the start."""
    num_longest = max(1, plan.sizes.max_batched_tokens // len(longest))
    for sequences in ((pooler.probe,), (longest,) * num_longest):
        _try(pooler, plan, f"a text of {len(sequences[0])} tokens", sequences)


def _warm_up_pair(pooler: PoolingModel, loaded: LoadedPooler, plan: ReplicaPlan) -> None:
    """Run a pair of texts, which clients may send to a model with one label."""
    encoder = TextEncoder(loaded.tokenizer, loaded.max_model_len, reads_types=loaded.reads_types)
    (encoded,) = encoder.encode([PoolingRequest("warm-up", (TextPair("a", "b"),), truncate=True)])
    if not isinstance(encoded, EncodedTexts):
        raise UnsupportedModelError(f"{plan.spec.source!r} can't read a pair of texts: {encoded}")
    _try(pooler, plan, "a pair of texts", encoded.token_ids, encoded.type_ids)


def _try(
    pooler: PoolingModel,
    plan: ReplicaPlan,
    what: str,
    sequences: Sequence[TokenIds],
    type_ids: Sequence[TokenIds | None] = (),
) -> None:
    source = plan.spec.source
    try:
        rows = pooler(sequences, type_ids)
    except Exception as error:
        if is_fatal(error) or is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise UnsupportedModelError(f"{source!r} fails on {what}: {reason}") from error
    if not rows.isfinite().all():
        raise UnsupportedModelError(
            f"{source!r} gives no finite numbers; try another dtype than {plan.dtype}"
        )
