import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from deployments.contract.telemetry.memory_report import MemoryUse
from deployments.device.device import CpuDevice
from deployments.device.process_tree import RankGpus, TreeMemory, WatchedGpus
from tests.failing import failing

GROWN_BYTES = 256 * 2**20
"""Far more than other tests' threads and children give back meanwhile."""


def test_the_memory_of_processes_below_this_one_counts() -> None:
    before = TreeMemory(CpuDevice())().process_bytes
    code = f"x = bytearray({GROWN_BYTES}); print(len(x), flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        after = TreeMemory(CpuDevice())()
    finally:
        child.communicate(b"\n")
    assert before is not None
    assert after.process_bytes is not None
    assert after.process_bytes >= before + GROWN_BYTES // 2
    assert after.peak_bytes == after.process_bytes
    assert after.device_total_bytes


def test_gpus_of_workers_on_other_nodes_have_no_figures() -> None:
    gpus = RankGpus(4)
    assert gpus.name == "4 GPUs that Ray has found"
    assert gpus.torch_device.type == "cuda"
    assert TreeMemory(gpus)() == MemoryUse()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't tell shared pages")
def test_pages_of_a_file_count_once(tmp_path: Path) -> None:
    file = tmp_path / "mapped"
    file.write_bytes(bytes(GROWN_BYTES))
    code = (
        f"import mmap; file = open({str(file)!r}, 'rb'); "
        "pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ); "
        "print(max(pages[::4096]), flush=True); input()"
    )
    read = TreeMemory(CpuDevice())
    before = read().process_bytes
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(3)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        after = read().process_bytes
    finally:
        for child in children:
            child.communicate(b"\n")
    assert before is not None
    assert after is not None
    assert after - before < 2 * GROWN_BYTES


@dataclass
class FakeNvml:
    """Two GPUs; on the second, this process and a strange one compute."""

    asked: list[Any] = field(default_factory=list)

    def nvmlInit(self) -> None:  # noqa: N802 - the library's name
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self.asked.append(index)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        self.asked.append(uuid)
        return 1

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return b"a GPU"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=100, used=10 * (1 + handle))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        own = SimpleNamespace(pid=psutil.Process().pid, usedGpuMemory=7)
        return [own, SimpleNamespace(pid=-1, usedGpuMemory=50)] if handle else []


def test_gpus_are_those_that_ray_has_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-1")
    nvml = FakeNvml()
    gpus = WatchedGpus.assigned(nvml)
    assert nvml.asked == [0, "GPU-1"]
    assert (gpus.name, gpus.total_bytes, gpus.used_bytes()) == ("2 x a GPU", 200, 30)
    use = TreeMemory(gpus)()
    assert (use.process_bytes, use.device_used_bytes, use.device_total_bytes) == (7, 30, 200)


def test_a_driver_that_tells_no_processes_costs_one_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    error = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetComputeRunningProcesses", failing(error))
    use = TreeMemory(WatchedGpus.assigned(FakeNvml()))()
    assert (use.process_bytes, use.peak_bytes) == (None, None)
    assert (use.device_used_bytes, use.device_total_bytes) == (20, 100)


def test_a_process_without_gpus_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="sees none"):
        WatchedGpus.assigned(FakeNvml())
