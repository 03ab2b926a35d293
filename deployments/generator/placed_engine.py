"""A model on a replica's device, with as much KV memory as its share of the device holds.

It is made on the engine's thread (`deployments.engine.engine_thread`), whose number of compute
threads it sets.
"""

from dataclasses import dataclass
from functools import partial

from deployments.contract.model_spec import ModelSpec
from deployments.contract.telemetry.start_progress import StartProgress
from deployments.device.device import MemoryDevice
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel, load_config, load_model
from deployments.generator.fingerprint import versions_of
from deployments.generator.text_engine import EngineFacts
from deployments.plan.memory_budget import GIB
from deployments.plan.replica_plan import ReplicaPlan
from deployments.plan.replica_report import MeasuredMemory, MemoryPlan
from deployments.replica.device_share import (
    load_onto_share,
    log_sizes,
    measure_memory,
    plan_share,
    require_memory,
)
from deployments.replica.start_phases import EndPhase


@dataclass(frozen=True, slots=True)
class PlacedEngine:
    """An engine that is ready to run.

    Attributes:
        engine: The engine, warmed up; the thread that made it owns it.
        loaded: The model and its tokenizer.
        plan: The sizes of the replica, and how its share of the device is divided.
        num_threads: Number of compute threads.
        measured: What the start has measured of the device's memory; None on a CPU.
    """

    engine: Engine
    loaded: LoadedModel
    plan: ReplicaPlan
    num_threads: int
    measured: MeasuredMemory | None = None

    @property
    def facts(self) -> EngineFacts:
        """What the replica is told of the engine and its model."""
        loaded, plan = self.loaded, self.plan
        return EngineFacts(
            tokenizer=loaded.tokenizer,
            processor=loaded.processor,
            generation_config=loaded.model.generation_config,
            vocab_size=loaded.text_config.vocab_size,
            limits=self.engine.limits,
            layout=self.engine.layout,
            memory=MemoryPlan.of(plan, self.measured),
            num_parameters=plan.shape.weights.total,
            dtype=plan.spec.entry.quantization or plan.dtype,
            num_threads=self.num_threads,
            summary=self.summary,
            versions=versions_of(plan.spec, loaded.model.device),
            attention=self.engine.attention,
        )

    @property
    def summary(self) -> str:
        """The log's description of the model: its dtype, its memory, and how a GPU runs it."""
        dtype = str(self.loaded.model.dtype).removeprefix("torch.")
        quantization = self.plan.spec.entry.quantization
        weights = f" with {quantization} weights" if quantization else ""
        on_gpu = "" if self.plan.device.on_cpu else f"; {self._on_gpu}"
        return (
            f"{dtype}{weights}, KV memory for {self.plan.kv.num_tokens} tokens, "
            f"{self.plan.kv.kv_bytes / GIB:.3f} GiB; {self.plan.memory_summary}{on_gpu}"
        )

    @property
    def _on_gpu(self) -> str:
        """How the engine runs on a GPU."""
        captured = self.engine.captured or "no CUDA graphs at the start"
        return f"{self.engine.attention}; {self.engine.forward}; {captured}"


def place_engine(
    spec: ModelSpec,
    device: MemoryDevice,
    end_phase: EndPhase = lambda name: None,
    progress: StartProgress | None = None,
) -> PlacedEngine:
    """Load a model onto a device, plan its memory and warm it up.

    Args:
        spec: The model.
        device: The device.
        end_phase: Notes that a phase has ended.
        progress: Counts what is downloaded and loaded.

    Raises:
        UnsupportedModelError: The model can't be served; one line says why.
        DeviceMemoryError: The share of the device is too small.
    """
    entry = spec.entry
    plan = plan_share(spec, load_config(spec.source, revision=entry.revision), device)
    load = partial(
        load_model,
        spec.source,
        revision=entry.revision,
        dtype=plan.dtype,
        device=device.torch_device,
        quantization=entry.quantization,
    )
    loaded, plan, num_threads = load_onto_share(plan, device, load, end_phase, progress)
    log_sizes(plan)
    limits = EngineLimits(
        max_num_seqs=plan.sizes.max_num_seqs,
        max_model_len=plan.sizes.max_model_len,
        max_batched_tokens=plan.sizes.max_batched_tokens,
        max_stall_s=None if entry.max_stall_ms is None else entry.max_stall_ms / 1000,
        prefix_caching=entry.prefix_caching,
        cuda_graphs=entry.cuda_graphs,
        kv_blocks=plan.kv.kv_blocks,
    )
    with require_memory(plan):
        engine = Engine(loaded, limits)
        engine.warm_up()
    end_phase("warm-up")
    measured = measure_memory(device, loaded.num_weight_bytes, engine.captured_bytes)
    return PlacedEngine(engine, loaded, plan, num_threads, measured)
