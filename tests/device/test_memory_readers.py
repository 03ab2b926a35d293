import mmap
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from deployments.device.device import CpuDevice, CudaDevice
from deployments.device.memory_readers import (
    CpuMemory,
    CudaMemory,
    NvmlDevice,
    memory_reader,
    unshared_bytes,
)
from deployments.plan import cgroup
from deployments.plan.cgroup import ContainerMemory

GIB = 2**30
UUID = "1b3e0000-0000-0000-0000-000000000000"
STATS = {
    "allocated_bytes.all.current": 3 * GIB,
    "allocated_bytes.all.peak": 5 * GIB,
    "reserved_bytes.all.current": 4 * GIB,
}


class NvmlError(Exception):
    """Stands for `pynvml.NVMLError`."""


@dataclass
class FakeNvml:
    """A driver that knows one GPU, or a slice of one; `broken` names functions that fail."""

    broken: set[str] = field(default_factory=set)
    processes: Mapping[int, int | None] = field(default_factory=dict)
    name: str = f"GPU-{UUID}"

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name, here and below
        self._may_fail("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:  # noqa: N802
        self._may_fail("nvmlDeviceGetHandleByUUID")
        if uuid != self.name:
            raise NvmlError(f"no device is named {uuid}")
        return "handle"

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> object:  # noqa: N802
        self._may_fail("nvmlDeviceGetMemoryInfo")
        assert handle == "handle"
        return SimpleNamespace(total=80 * GIB, used=50 * GIB, free=30 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[object]:  # noqa: N802
        self._may_fail("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=p, usedGpuMemory=used) for p, used in self.processes.items()]

    def _may_fail(self, name: str) -> None:
        if name in self.broken:
            raise NvmlError(f"{name}: not supported")


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid=UUID)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index: STATS)


@pytest.mark.usefixtures("_gpu")
def test_a_gpu_s_figures_come_from_its_driver_and_from_torch() -> None:
    nvml = FakeNvml(processes={1: 9 * GIB, os.getpid(): 6 * GIB})
    use = CudaMemory(0, nvml)()
    assert (use.device_total_bytes, use.device_used_bytes) == (80 * GIB, 50 * GIB)
    assert (use.process_bytes, use.peak_bytes) == (6 * GIB, 5 * GIB)
    assert (use.allocated_bytes, use.reserved_bytes) == (3 * GIB, 4 * GIB)
    assert use.fragmented_bytes == GIB


@pytest.mark.usefixtures("_gpu")
def test_a_slice_of_a_gpu_is_found_by_its_own_name() -> None:
    nvml = FakeNvml(processes={os.getpid(): 6 * GIB}, name=f"MIG-{UUID}")
    use = CudaMemory(0, nvml)()
    assert (use.device_total_bytes, use.process_bytes) == (80 * GIB, 6 * GIB)
    assert use.held_bytes == 6 * GIB


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    "broken", [{"nvmlInit"}, {"nvmlDeviceGetHandleByUUID"}, {"nvmlDeviceGetMemoryInfo"}]
)
def test_a_driver_that_fails_costs_only_its_own_figures(
    broken: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    read = CudaMemory(0, FakeNvml(broken))
    for _ in range(3):
        use = read()
        assert use.device_total_bytes is use.device_used_bytes is None
        assert (use.allocated_bytes, use.reserved_bytes) == (3 * GIB, 4 * GIB)
    assert len(caplog.records) == 1, "it is logged once"


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("processes", [{}, {1: GIB}, {os.getpid(): None}, {os.getpid(): GIB}])
def test_a_process_that_the_driver_does_not_tell_is_not_known(
    processes: Mapping[int, int | None],
) -> None:
    # In a container, another process of the host may have this one's id: it holds less than this
    # one's allocator.
    use = CudaMemory(0, FakeNvml(processes=processes))()
    assert (use.process_bytes, use.device_used_bytes) == (None, 50 * GIB)
    assert use.held_bytes == use.reserved_bytes is not None


@pytest.mark.usefixtures("_gpu")
def test_processes_that_can_not_be_listed_cost_only_that_figure() -> None:
    use = CudaMemory(0, FakeNvml({"nvmlDeviceGetComputeRunningProcesses"}))()
    assert (use.process_bytes, use.device_used_bytes) == (None, 50 * GIB)
    assert use.held_bytes == use.reserved_bytes is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has NVIDIA's driver")
def test_a_machine_without_a_driver_knows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    found = NvmlDevice(UUID)
    assert found.memory() is found.process_bytes(os.getpid()) is None
    assert "NVML does not tell" in caplog.text


def test_a_cpu_s_figures_are_those_of_the_process_and_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroup, "memory", lambda: None)
    use = CpuMemory()()
    assert use.device_total_bytes == psutil.virtual_memory().total
    assert use.process_bytes is not None
    assert use.peak_bytes is not None
    assert use.device_used_bytes is not None
    assert 0 < use.process_bytes <= use.peak_bytes
    assert 0 < use.device_used_bytes <= use.device_total_bytes
    assert use.allocated_bytes is use.reserved_bytes is use.fragmented_bytes is None


def test_a_container_s_memory_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "memory", lambda: ContainerMemory(1000, 400))
    use = CpuMemory()()
    assert (use.device_total_bytes, use.device_used_bytes) == (1000, 400)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't tell shared pages")
def test_memory_that_is_not_shared_is_without_the_pages_of_files(tmp_path: Path) -> None:
    file, size = tmp_path / "mapped", 256 * 2**20
    file.write_bytes(bytes(size))
    before = unshared_bytes()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        resident = psutil.Process().memory_info().rss
        assert max(pages[:: mmap.PAGESIZE]) == 0
        assert psutil.Process().memory_info().rss > resident + size // 2
        assert unshared_bytes() < before + size // 2
    own = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    own.write(bytes(size))
    assert unshared_bytes() > before + size // 2
    own.close()


@pytest.mark.usefixtures("_gpu")
def test_each_device_has_its_reader() -> None:
    assert isinstance(memory_reader(CpuDevice()), CpuMemory)
    assert isinstance(memory_reader(CudaDevice()), CudaMemory)
