"""A model on a replica's device, with as much KV memory as its share of the device holds.

It is made on the engine's thread (`deployments.engine.engine_thread`), whose number of compute
threads it sets.
"""

from dataclasses import dataclass

from deployments.device.device import MemoryDevice
from deployments.device.memory_budget import GIB, KVPlan, plan_kv_blocks
from deployments.device_share import claim_share, set_compute_threads
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel, load_model
from deployments.engine.model.memory_demand import memory_demand
from deployments.engine.replay.graph_sizes import MAX_GRAPHS
from deployments.model_spec import ModelSpec
from deployments.start_phases import EndPhase


@dataclass(frozen=True, slots=True)
class PlacedEngine:
    """An engine that is ready to run.

    Attributes:
        spec: The settings that it was made from.
        engine: The engine, warmed up; the thread that made it owns it.
        loaded: The model and its tokenizer.
        plan: How the share of the device is divided.
        num_threads: Number of compute threads.
    """

    spec: ModelSpec
    engine: Engine
    loaded: LoadedModel
    plan: KVPlan
    num_threads: int

    @property
    def summary(self) -> str:
        """The log's description of the model: its dtype and its KV memory."""
        dtype = str(self.loaded.model.dtype).removeprefix("torch.")
        weights = f" with {self.spec.quantization} weights" if self.spec.quantization else ""
        return (
            f"{dtype}{weights}, KV memory for {self.plan.num_tokens} tokens, "
            f"{self.plan.kv_bytes / GIB:.3f} GiB"
        )


def place_engine(
    spec: ModelSpec, device: MemoryDevice, end_phase: EndPhase = lambda name: None
) -> PlacedEngine:
    """Load a model onto a device, plan its memory and warm it up.

    Raises:
        UnsupportedModelError: The model can't be served; one line says why.
        DeviceMemoryError: The share of the device is too small.
    """
    claim_share(spec, device)
    total_bytes = device.total_bytes
    loaded = load_model(
        spec.source,
        revision=spec.revision,
        dtype=spec.dtype,
        device=device.torch_device,
        quantization=spec.quantization,
    )
    end_phase("weights")
    num_threads = set_compute_threads(spec, loaded.num_weight_bytes)
    is_captured = spec.cuda_graphs and device.torch_device.type == "cuda"
    demand = memory_demand(
        loaded,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_batched_tokens=spec.max_batched_tokens,
        max_graphs=MAX_GRAPHS if is_captured else 0,
    )
    plan = plan_kv_blocks(
        total_bytes=total_bytes,
        share=spec.device_share,
        demand=demand,
        max_num_seqs=spec.max_num_seqs,
        foreign_bytes=device.foreign_bytes,
    )
    limits = EngineLimits(
        spec.max_num_seqs,
        spec.max_model_len,
        spec.max_batched_tokens,
        spec.prefix_caching,
        spec.cuda_graphs,
        kv_blocks=plan.kv_blocks,
    )
    engine = Engine(loaded, limits)
    engine.warm_up()
    end_phase("warm-up")
    return PlacedEngine(spec, engine, loaded, plan, num_threads)
