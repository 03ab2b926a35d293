"""Reads the memory in use, of this process and of its device, for `deployments.device.monitor`.

On a GPU, NVIDIA's driver counts the whole card and what this process takes of it, and torch counts
what its allocator holds. A driver that is missing or fails costs its own figures only. On a CPU the
figures are those of the process, and of its container or machine.

Source: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

import logging
import os
import resource
import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

import psutil
import pynvml
import torch

from deployments.contract.telemetry.memory_report import MemoryUse
from deployments.device.device import MemoryDevice
from deployments.plan import cgroup

logger = logging.getLogger(__name__)

MAXRSS_BYTES: Final = 1 if sys.platform == "darwin" else 1024
"""The unit of `ru_maxrss`."""


def memory_reader(device: MemoryDevice) -> Callable[[], MemoryUse]:
    """Return a function that reads the memory in use on a device."""
    if device.torch_device.type == "cuda":
        return CudaMemory(device.torch_device.index or 0)
    return CpuMemory()


def unshared_bytes() -> int:
    """Return the memory of this process that no file backs.

    The rest is pages of files, such as torch's libraries. They are in memory once for all processes
    that map them, and the system drops them when others need memory.
    """
    memory = psutil.Process().memory_info()
    return int(memory.rss) - int(getattr(memory, "shared", 0))  # Linux tells it


class CpuMemory:
    """Reads the memory of this process, and of its container or else of the machine."""

    def __init__(self) -> None:
        self._process = psutil.Process()

    def __call__(self) -> MemoryUse:
        """Return the figures of this moment."""
        process_bytes = int(self._process.memory_info().rss)
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES
        container = cgroup.memory()
        if container is not None:
            total_bytes, used_bytes = container.limit_bytes, container.used_bytes
        else:
            machine = psutil.virtual_memory()
            total_bytes, used_bytes = machine.total, machine.total - machine.available
        return MemoryUse(
            device_total_bytes=total_bytes,
            device_used_bytes=used_bytes,
            process_bytes=process_bytes,
            peak_bytes=max(peak_bytes, process_bytes),
        )


class CudaMemory:
    """Reads the memory of a GPU, of this process on it, and of torch's allocator."""

    def __init__(self, index: int, nvml: Any = pynvml) -> None:
        """Keep the GPU's number.

        Args:
            index: The number that the GPU has in this process.
            nvml: The module `pynvml`, or what behaves like it.
        """
        self._index = index
        self._api = nvml

    @cached_property
    def _nvml(self) -> "NvmlDevice":
        """The GPU in NVML. The first sample looks for it: a driver that hangs delays no start."""
        # Some builds of torch don't tell the id; NVML then finds no such GPU.
        uuid = getattr(torch.cuda.get_device_properties(self._index), "uuid", None)
        return NvmlDevice(str(uuid), self._api)

    def __call__(self) -> MemoryUse:
        """Return the figures of this moment."""
        stats = torch.cuda.memory_stats(self._index)
        reserved_bytes = int(stats.get("reserved_bytes.all.current", 0))
        card = self._nvml.memory()
        process_bytes = self._nvml.process_bytes(os.getpid())
        if process_bytes is not None and process_bytes < reserved_bytes:
            # In a container the driver tells the host's process ids, so this is another process.
            process_bytes = None
        return MemoryUse(
            device_total_bytes=None if card is None else int(card.total),
            device_used_bytes=None if card is None else int(card.used),
            process_bytes=process_bytes,
            allocated_bytes=int(stats.get("allocated_bytes.all.current", 0)),
            reserved_bytes=reserved_bytes,
            peak_bytes=int(stats.get("allocated_bytes.all.peak", 0)),
        )


class NvmlDevice:
    """A GPU as NVIDIA's driver knows it. What the driver does not tell is None."""

    def __init__(self, uuid: str, nvml: Any = pynvml) -> None:
        """Find the GPU; without NVML, all figures are None.

        Args:
            uuid: CUDA's id of the GPU, or of a slice of it (MIG), without a prefix.
            nvml: The module `pynvml`, or what behaves like it.
        """
        self._nvml = nvml
        self._silent: set[str] = set()
        self._handle = self._find(uuid)

    def _find(self, uuid: str) -> Any:
        try:
            self._nvml.nvmlInit()
            try:
                return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            except Exception:  # noqa: BLE001 - NVML's own classes; a slice has another name
                return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        except Exception as error:  # noqa: BLE001 - the library is missing, or any of its errors
            logger.warning("NVML does not tell the GPU's memory: %s", error)
            return None

    def memory(self) -> Any:
        """Return the whole card's memory, with `total` and `used` in bytes; None if unknown."""
        return self._ask("nvmlDeviceGetMemoryInfo")

    def process_bytes(self, process_id: int) -> int | None:
        """Return what a process takes, its CUDA context included; None if unknown."""
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses") or ()
        used = [each.usedGpuMemory for each in processes if each.pid == process_id]
        return None if None in used or not used else sum(used)

    def _ask(self, function: str) -> Any:
        """Ask NVML about the GPU; return None if it fails, and log that once."""
        if self._handle is None:
            return None
        try:
            return getattr(self._nvml, function)(self._handle)
        except Exception as error:  # noqa: BLE001 - any of the driver's errors costs one figure
            if function not in self._silent:
                logger.warning("%s fails: %s", function, error)
            self._silent.add(function)
            return None
