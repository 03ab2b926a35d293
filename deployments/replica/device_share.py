"""A replica's share of its device: its memory plan, the cap on its memory, its compute threads.

Call these functions on the thread that runs the model: torch keeps a thread count per thread.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from transformers import PreTrainedConfig

from deployments.compute.device_errors import is_out_of_memory
from deployments.compute.host_memory import keep_freed_memory
from deployments.compute.hub_files import download_files
from deployments.contract.model_spec import ModelSpec, number
from deployments.contract.telemetry.start_progress import StartPhase, StartProgress
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.device.device import (
    LARGE_MODEL_BYTES,
    MemoryDevice,
    num_compute_threads,
    num_cores,
)
from deployments.device.memory_readers import memory_reader
from deployments.plan import cgroup
from deployments.plan.checkpoint import weights_of
from deployments.plan.memory_budget import GIB, DeviceMemoryError, ModelTooLargeError
from deployments.plan.processor import has_bfloat16
from deployments.plan.replica_plan import ReplicaPlan, SequenceLengthError, plan_replica
from deployments.plan.replica_report import MeasuredMemory
from deployments.plan.sizes import DeviceMemory
from deployments.plan.weight_count import counted_shape
from deployments.replica.start_phases import EndPhase

logger = logging.getLogger("ray.serve.raystream.replica")


class LoadedModel(Protocol):
    """A model on its device."""

    @property
    def num_weight_bytes(self) -> int:
        """The weights that a step reads."""
        ...


L = TypeVar("L", bound=LoadedModel)


def plan_share(
    spec: ModelSpec, config: PreTrainedConfig, device: MemoryDevice, *, is_pooler: bool = False
) -> ReplicaPlan:
    """Plan a replica's memory before its model is loaded.

    Raises:
        ModelTooLargeError: The share can't hold the model; the message says what to change.
        DeviceMemoryError: The same, but it could if other processes left it their memory.
        UnsupportedModelError: The configuration lacks a size, or a given length is beyond it.
    """
    try:
        shape = counted_shape(config, spec.source, spec.entry.revision, is_pooler=is_pooler)
    except ValueError as error:
        raise UnsupportedModelError(f"can't load {spec.source!r}: {error}") from error
    on_cpu = device.torch_device.type == "cpu"
    memory = DeviceMemory(
        device.total_bytes,
        device.foreign_bytes,
        on_cpu=on_cpu,
        has_bf16=on_cpu and has_bfloat16(),
        whole_bytes=cgroup.total_bytes() if on_cpu else None,
    )
    try:
        return plan_replica(spec, shape, memory, is_pooler=is_pooler)
    except DeviceMemoryError as error:
        whole_bytes = memory.whole_bytes or device.total_bytes
        if (error.least_bytes or 0) > whole_bytes * spec.device_share:
            raise ModelTooLargeError(error.message, error.least_bytes) from None
        raise
    except SequenceLengthError as error:
        raise UnsupportedModelError(str(error)) from error


def log_sizes(plan: ReplicaPlan) -> None:
    """Log the sizes that were chosen, and why."""
    for line in plan.explanations:
        # Serve's handlers write a record with this mark to the file only.
        logger.info("%s", line, extra={"log_to_stderr": False})


@contextmanager
def require_memory(plan: ReplicaPlan) -> Iterator[None]:
    """Turn every error for want of memory in the block into one class, with one message.

    Raises:
        DeviceMemoryError: Memory ran out.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"memory ran out, although a share of {plan.spec.device_share:g} of "
            f"{plan.device.total_bytes / GIB:.2f} GiB was planned with "
            f"{plan.demand.weight_bytes / GIB:.2f} GiB for weights, "
            f"{plan.demand.activation_bytes / GIB:.2f} GiB for a step and "
            f"{plan.kv.kv_bytes / GIB:.2f} GiB for keys and values; raise num_gpus (or gpu_share), "
            "or lower max_batched_tokens or max_model_len"
        ) from error


def load_onto_share(
    plan: ReplicaPlan,
    device: MemoryDevice,
    load: Callable[[], L],
    end_phase: EndPhase,
    progress: StartProgress | None,
    large_bytes: int = LARGE_MODEL_BYTES,
) -> tuple[L, ReplicaPlan, int]:
    """Load a model onto its share of a device.

    Args:
        plan: The sizes of the replica.
        device: The device.
        load: Loads the model; its files are here by then.
        end_phase: Notes that a phase has ended.
        progress: Counts what is downloaded and loaded.
        large_bytes: See `num_compute_threads`.

    Returns:
        The model, the plan with the bytes of its weights, and the number of compute threads.

    Raises:
        DeviceMemoryError: The share of the device is too small.
    """
    source, revision = plan.spec.source, plan.spec.entry.revision
    progress = progress or StartProgress()
    confine_to_share(plan.spec, device)
    download_files(source, revision, progress)
    num_files, num_bytes = weights_of(source, revision)
    progress.begin(StartPhase.LOADING, total_bytes=num_bytes, total_files=num_files)
    with require_memory(plan):
        loaded = load()
    end_phase("weights")
    progress.begin(StartPhase.WARMING_UP)
    num_threads = set_compute_threads(plan.spec, loaded.num_weight_bytes, large_bytes)
    return loaded, plan.with_weights(loaded.num_weight_bytes, device.foreign_bytes), num_threads


def measure_memory(
    device: MemoryDevice, weight_bytes: int, captured_bytes: int = 0
) -> MeasuredMemory | None:
    """Return what the process holds of a GPU once its model has run; None on a CPU.

    Args:
        device: The device.
        weight_bytes: The weights that were loaded.
        captured_bytes: What captured steps have taken.
    """
    if device.torch_device.type != "cuda":
        return None
    use = memory_reader(device)()
    return MeasuredMemory(weight_bytes, captured_bytes, use.peak_bytes or 0, use.process_bytes)


def confine_to_share(spec: ModelSpec, device: MemoryDevice) -> None:
    """Cap this process at its share of the device, and let loading use every core."""
    keep_freed_memory()
    torch.set_num_threads(num_cores())
    device.enforce_share(spec.device_share)


def set_compute_threads(
    spec: ModelSpec, weight_bytes: int, large_bytes: int = LARGE_MODEL_BYTES
) -> int:
    """Set how many threads torch computes with on the calling thread, and return the number.

    Args:
        spec: The model; the `num_threads` of its entry decides, if set.
        weight_bytes: The weights that a step reads.
        large_bytes: See `num_compute_threads`.
    """
    num_threads = number(spec.entry.num_threads) or num_compute_threads(weight_bytes, large_bytes)
    torch.set_num_threads(num_threads)
    return num_threads
