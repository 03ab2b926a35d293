"""The device that a replica runs on: its memory, and the cap on the replica's share of it."""

import logging
import os
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import torch

from deployments.plan import cgroup

logger = logging.getLogger(__name__)

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables that torch reads its settings from. A user who sets one overrides ours."""

EXPANDABLE = "expandable_segments:True"

LARGE_MODEL_BYTES = 256 * 2**20
"""From this size of the weights on, HTTP costs almost nothing compared with a step."""


class MemoryDevice(Protocol):
    """A device as memory planning sees it."""

    @property
    def name(self) -> str:
        """Its name, for the log."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """The device for torch's tensors."""
        ...

    @property
    def total_bytes(self) -> int:
        """The memory that shares are fractions of."""
        ...

    @property
    def foreign_bytes(self) -> int:
        """Memory in use that torch in this process has not allocated."""
        ...

    def enforce_share(self, share: float) -> None:
        """Cap what this process allocates at its share."""
        ...


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A GPU that Ray has assigned; CUDA_VISIBLE_DEVICES makes it number 0."""

    index: int = 0

    @property
    def name(self) -> str:
        """The GPU's product name."""
        return torch.cuda.get_device_name(self.index)

    @property
    def torch_device(self) -> torch.device:
        """The GPU."""
        return torch.device("cuda", self.index)

    @property
    def total_bytes(self) -> int:
        """All memory of the GPU."""
        return int(torch.cuda.mem_get_info(self.index)[1])

    @property
    def foreign_bytes(self) -> int:
        """The CUDA context, and the memory of other processes."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.index)
        return max(0, int(total_bytes - free_bytes) - torch.cuda.memory_reserved(self.index))

    def enforce_share(self, share: float) -> None:
        """Cap the caching allocator, and let its segments grow.

        The CUDA context, some hundred MiB, is not under the cap.
        """
        let_segments_grow()
        torch.cuda.set_per_process_memory_fraction(share, self.index)


def let_segments_grow() -> bool:
    """Make the allocator grow its segments instead of adding more; return whether it will.

    Steps differ in size. In segments of fixed size, the blocks of one step fit the next one badly,
    and that wastes memory that the plan relies on.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
    """
    if any(name in os.environ for name in ALLOCATOR_VARIABLES):
        logger.info("the allocator's settings come from the environment")
        return False
    # A private call, but it works at any time; torch may have read its environment already.
    configure: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None:
        logger.warning("segments of the GPU's memory can't grow: this torch has no setting for it")
        return False
    try:
        configure(EXPANDABLE)
    except (RuntimeError, ValueError) as error:
        logger.warning("segments of the GPU's memory can't grow: %s", error)
        return False
    return True


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """The machine's memory; shares are fractions of what is free at the start."""

    @property
    def name(self) -> str:
        """Its kind and its number of cores."""
        return f"CPU of {num_cores()} core(s)"

    @property
    def torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def total_bytes(self) -> int:
        """Memory that is free now, on the machine and in the container."""
        return cgroup.available_bytes()

    @property
    def foreign_bytes(self) -> int:
        """Zero: the total counts only free memory."""
        return 0

    def enforce_share(self, share: float) -> None:
        """Do nothing: an operating system has no such cap for one process."""


def open_device(kind: str, *, has_gpu: bool) -> MemoryDevice:
    """Return the device of this kind.

    Args:
        kind: auto, cpu or cuda.
        has_gpu: Whether Ray assigned a GPU, or a part of one, to this process.

    Raises:
        ValueError: The model needs a GPU and none can be used.
    """
    if kind == "cuda" or (kind == "auto" and has_gpu):
        if not torch.cuda.is_available():
            raise ValueError(
                "the model asks for a GPU, but this process sees none: install the CUDA build of "
                "torch, or write `device: cpu` and `num_gpus: 0` for the model"
            )
        return CudaDevice()
    return CpuDevice()


def num_compute_threads(weight_bytes: int, large_bytes: int = LARGE_MODEL_BYTES) -> int:
    """Return how many threads a CPU model computes with.

    A large model gets every core: its step takes tens of milliseconds, and HTTP costs almost
    nothing compared with that. A small model's tokens cost as much in HTTP and Ray as in the model,
    so one core stays free for them: a compute thread that loses its core delays all others.

    Args:
        weight_bytes: The weights that a step reads.
        large_bytes: A model is large from this size of its weights on.
    """
    return num_cores() if weight_bytes >= large_bytes else max(1, num_cores() - 1)


def num_cores() -> int:
    """Return how many cores this process may use, by its affinity and its container's limit."""
    # macOS binds no process to cores.
    is_bound = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if is_bound else os.cpu_count() or 1
    allowed = cgroup.num_cores()
    return num_cores if allowed is None else min(num_cores, ceil(allowed))
