"""Memory of a replica whose model runs in other processes, and the GPUs of these.

This process must not open such a GPU by CUDA: its context would take some hundred MiB. So all
figures come from NVIDIA's driver, and on a CPU from the system. The driver knows its own node only:
GPUs of processes that Ray starts on any nodes have no figures.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil
import pynvml
import torch

from deployments.contract.telemetry.memory_report import MemoryUse
from deployments.device.device import MemoryDevice
from deployments.device.memory_readers import CpuMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WatchedGpus:
    """GPUs that Ray has assigned to this process, and that only processes below it open.

    Attributes:
        handles: NVML's handles of them.
        nvml: The module `pynvml`, or what behaves like it.
    """

    handles: tuple[Any, ...]
    nvml: Any = pynvml

    @classmethod
    def assigned(cls, nvml: Any = pynvml) -> "WatchedGpus":
        """Return the GPUs that CUDA_VISIBLE_DEVICES names, by number or by id; all without it.

        Numbers are NVML's, which CUDA below has too: CUDA_DEVICE_ORDER is PCI_BUS_ID there.

        Raises:
            ValueError: There is none, or NVIDIA's driver does not answer.
        """
        try:
            nvml.nvmlInit()
            named = os.environ.get("CUDA_VISIBLE_DEVICES")
            if named is None:
                names = [str(each) for each in range(nvml.nvmlDeviceGetCount())]
            else:
                names = [each.strip() for each in named.split(",") if each.strip()]
            handles = tuple(
                nvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdecimal()
                else nvml.nvmlDeviceGetHandleByUUID(name)
                for name in names
            )
        except Exception as error:  # noqa: BLE001 - the library is missing, or any of its errors
            raise ValueError(f"the model asks for a GPU, and NVML tells of none: {error}") from None
        if not handles:
            raise ValueError("the model asks for a GPU, but this process sees none")
        return cls(handles, nvml)

    @property
    def name(self) -> str:
        """The product name, and how many there are if there are several."""
        name = self.nvml.nvmlDeviceGetName(self.handles[0])
        name = name.decode() if isinstance(name, bytes) else str(name)
        return name if len(self.handles) == 1 else f"{len(self.handles)} x {name}"

    @property
    def torch_device(self) -> torch.device:
        """The kind of the device; nothing is put there."""
        return torch.device("cuda")

    @property
    def total_bytes(self) -> int:
        """All memory of the GPUs."""
        return sum(int(self.nvml.nvmlDeviceGetMemoryInfo(each).total) for each in self.handles)

    @property
    def foreign_bytes(self) -> int:
        """Zero: the engine below plans its memory itself."""
        return 0

    def enforce_share(self, share: float) -> None:
        """Do nothing: this process allocates nothing there."""

    def used_bytes(self) -> int:
        """Return the memory in use on the GPUs, by all processes."""
        return sum(int(self.nvml.nvmlDeviceGetMemoryInfo(each).used) for each in self.handles)

    def bytes_of(self, process_ids: set[int]) -> int | None:
        """Return what some processes take of the GPUs; None if the driver does not say."""
        try:
            running = [
                process
                for handle in self.handles
                for process in self.nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            ]
        except Exception as error:  # noqa: BLE001 - any of the driver's errors costs one figure
            logger.debug("NVML does not tell the processes on the GPUs: %s", error)
            return None
        used = [each.usedGpuMemory for each in running if each.pid in process_ids]
        known = [each for each in used if each is not None]
        # In a container the driver may tell the host's process ids.
        return sum(known) if known and len(known) == len(used) else None


@dataclass(frozen=True, slots=True)
class RankGpus:
    """GPUs that the ranks of a divided model open, processes that Ray has started on any nodes.

    Attributes:
        num: How many there are.
    """

    num: int

    @property
    def name(self) -> str:
        """How many there are."""
        return f"{self.num} GPUs that Ray has found"

    @property
    def torch_device(self) -> torch.device:
        """The kind of the device; nothing is put there."""
        return torch.device("cuda")

    @property
    def total_bytes(self) -> int:
        """Zero: this node's driver does not know them."""
        return 0

    @property
    def foreign_bytes(self) -> int:
        """Zero: the engine plans its memory itself."""
        return 0

    def enforce_share(self, share: float) -> None:
        """Do nothing: this process allocates nothing there."""


class TreeMemory:
    """Reads the memory of this process and of those below it."""

    def __init__(self, device: MemoryDevice) -> None:
        """Keep the device: `WatchedGpus`, `RankGpus`, or else the CPU."""
        self._device = device
        self._machine = CpuMemory()
        self._peak_bytes = 0

    def __call__(self) -> MemoryUse:
        """Return the figures of this moment; none of `RankGpus`."""
        if isinstance(self._device, RankGpus):
            return MemoryUse()
        if isinstance(self._device, WatchedGpus):
            held = self._device.bytes_of({each.pid for each in _tree()})
            self._peak_bytes = max(self._peak_bytes, held or 0)
            return MemoryUse(
                device_total_bytes=self._device.total_bytes,
                device_used_bytes=self._device.used_bytes(),
                process_bytes=held,
                peak_bytes=self._peak_bytes or None,
            )
        resident_bytes = _resident_bytes(_tree())
        self._peak_bytes = max(self._peak_bytes, resident_bytes)
        return replace(self._machine(), process_bytes=resident_bytes, peak_bytes=self._peak_bytes)


def _tree() -> Iterator[psutil.Process]:
    this = psutil.Process()
    yield this
    yield from this.children(recursive=True)


def _resident_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return the memory that processes hold.

    Pages of files and of shared memory count once, as those of the process that has the most: all
    load the same libraries. The kernel tells each process's part of them, too (smaps_rollup), but
    walks all pages for it: 90 ms of a core for the 5.3 GiB of a small model on vLLM, instead of
    0.1 ms. The two figures were 0.04 % apart.
    """
    own_bytes = shared_bytes = 0
    for process in processes:
        with suppress(psutil.Error):
            memory = process.memory_info()
            shared = getattr(memory, "shared", 0)  # Linux tells it
            own_bytes += memory.rss - shared
            shared_bytes = max(shared_bytes, shared)
    return own_bytes + shared_bytes
