"""A replica's share of its device: the cap on its memory, and its compute threads.

Call these functions on the thread that runs the model: torch keeps a thread count per thread.
"""

import torch

from deployments.compute.cpu.memory import keep_freed_memory
from deployments.device.device import (
    LARGE_MODEL_BYTES,
    MemoryDevice,
    num_compute_threads,
    num_cores,
)
from deployments.model_spec import ModelSpec


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
