"""A replica's share of its device: its memory plan, the cap on its memory, its compute threads.

Call these functions on the thread that runs the model: torch keeps a thread count per thread.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedConfig

from deployments.compute.cpu.memory import keep_freed_memory
from deployments.compute.device_errors import is_out_of_memory
from deployments.compute.hub_files import download_files, weights_of
from deployments.contract.model_errors import UnsupportedModelError
from deployments.contract.model_spec import ModelSpec
from deployments.contract.start_progress import StartPhase, StartProgress
from deployments.device.device import (
    LARGE_MODEL_BYTES,
    MemoryDevice,
    num_compute_threads,
    num_cores,
)
from deployments.plan import cgroup
from deployments.plan.memory_budget import GIB, DeviceMemoryError, ModelTooLargeError
from deployments.plan.processor import has_bfloat16
from deployments.plan.replica_plan import (
    DeviceMemory,
    ReplicaPlan,
    SequenceLengthError,
    counted_shape,
    plan_replica,
)

logger = logging.getLogger("ray.serve.raystream.replica")


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
        shape = counted_shape(config, spec.source, spec.revision, is_pooler=is_pooler)
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


def begin_loading(spec: ModelSpec, progress: StartProgress) -> None:
    """Download what is missing of a model, and begin to count the weights that are loaded."""
    download_files(spec.source, spec.revision, progress)
    num_files, num_bytes = weights_of(spec.source, spec.revision)
    progress.begin(StartPhase.LOADING, total_bytes=num_bytes, total_files=num_files)


def claim_share(spec: ModelSpec, device: MemoryDevice) -> None:
    """Cap this process at its share of the device, and let loading use every core."""
    keep_freed_memory()
    torch.set_num_threads(num_cores())
    device.enforce_share(spec.device_share)


def set_compute_threads(
    spec: ModelSpec, weight_bytes: int, large_bytes: int = LARGE_MODEL_BYTES
) -> int:
    """Set how many threads torch computes with on the calling thread, and return the number.

    Args:
        spec: The model's entry; its `num_threads` decides, if set.
        weight_bytes: The weights that a step reads.
        large_bytes: See `num_compute_threads`.
    """
    num_threads = spec.num_threads or num_compute_threads(weight_bytes, large_bytes)
    torch.set_num_threads(num_threads)
    return num_threads
