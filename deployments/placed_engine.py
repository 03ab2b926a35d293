"""A model on a replica's device, with as many KV slots as its share of the device holds.

Made on the engine's thread (`deployments.engine.engine_thread`), whose compute threads it sets.
"""

import logging
from dataclasses import dataclass

import torch

from deployments.engine.cpu.allocator import keep_freed_memory
from deployments.engine.cuda.decode_buckets import MAX_GRAPHS
from deployments.engine.engine import Engine
from deployments.engine.engine_limits import EngineLimits
from deployments.engine.memory import memory_demand
from deployments.engine.model_loader import LoadedModel, load_model
from deployments.gpu.budget import GIB, KVPlan, plan_kv_slots
from deployments.gpu.device import MemoryDevice, num_compute_threads, num_cores
from deployments.model_spec import ModelSpec

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class PlacedEngine:
    """An engine that is ready to run.

    Attributes:
        engine: The engine, warmed up; the thread that made it owns it.
        loaded: Its model, and the tokenizer.
        plan: How the share of the device is spent.
        num_threads: Threads that compute.
    """

    engine: Engine
    loaded: LoadedModel
    plan: KVPlan
    num_threads: int


def place_engine(spec: ModelSpec, device: MemoryDevice) -> PlacedEngine:
    """Load a model onto a device, plan its memory and warm it up.

    Raises:
        UnsupportedModelError: The model can't be served; one line says why.
        DeviceMemoryError: The share of the device is too small.
    """
    keep_freed_memory()
    torch.set_num_threads(num_cores())
    share = spec.num_gpus or 1.0
    device.enforce_share(share)
    total_bytes = device.total_bytes
    loaded = load_model(
        spec.source,
        revision=spec.revision,
        dtype=spec.dtype,
        device=device.torch_device,
        quantization=spec.quantization,
    )
    num_threads = spec.num_threads or num_compute_threads(loaded.num_weight_bytes)
    torch.set_num_threads(num_threads)
    is_captured = spec.cuda_graphs and device.torch_device.type == "cuda"
    demand = memory_demand(
        loaded,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_batched_tokens=spec.max_batched_tokens,
        max_graphs=MAX_GRAPHS if is_captured else 0,
    )
    plan = plan_kv_slots(
        total_bytes=total_bytes,
        share=share,
        demand=demand,
        max_num_seqs=spec.max_num_seqs,
        foreign_bytes=device.foreign_bytes,
    )
    limits = EngineLimits(
        plan.num_slots,
        spec.max_model_len,
        spec.max_batched_tokens,
        spec.prefix_caching,
        spec.cuda_graphs,
    )
    engine = Engine(loaded, limits)
    engine.warm_up()
    return PlacedEngine(engine, loaded, plan, num_threads)


def log_plan(placed: PlacedEngine, spec: ModelSpec, device: MemoryDevice, seconds: float) -> None:
    """Log in one line what a replica has become, and how long that took."""
    logger.info(
        "%s is ready after %.1f s on %s: share %g of the device, %d compute thread(s), %s%s, "
        "%d KV slots of %d tokens, %.3f GiB",
        spec.id,
        seconds,
        device.name,
        spec.num_gpus or 1,
        placed.num_threads,
        str(placed.loaded.model.dtype).removeprefix("torch."),
        f" with {spec.quantization} weights" if spec.quantization else "",
        placed.plan.num_slots,
        spec.max_model_len,
        placed.plan.kv_bytes / GIB,
    )
