import os
from math import ceil

import psutil
import pytest
import torch

from deployments.device.device import (
    LARGE_MODEL_BYTES,
    CpuDevice,
    CudaDevice,
    num_compute_threads,
    num_cores,
    open_device,
)
from deployments.plan import cgroup
from tests.offenders import for_each


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """Make the process see a GPU of 80 GiB; return the shares that are enforced on it."""
    enforced: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (70 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A GPU")
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, index: enforced.append((share, index)),
    )
    return enforced


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("kind", "has_gpu"), [("auto", False), ("cpu", False), ("cpu", True)])
def test_a_replica_without_a_gpu_runs_on_the_cpu(kind: str, has_gpu: bool) -> None:
    assert open_device(kind, has_gpu=has_gpu) == CpuDevice()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("kind", "has_gpu"), [("auto", True), ("cuda", True), ("cuda", False)])
def test_a_replica_with_a_gpu_runs_on_it(kind: str, has_gpu: bool) -> None:
    assert open_device(kind, has_gpu=has_gpu) == CudaDevice(0)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("kind", "has_gpu"), [("auto", True), ("cuda", False)])
def test_a_gpu_that_torch_does_not_see_is_refused_with_what_to_change(
    kind: str, has_gpu: bool
) -> None:
    with pytest.raises(ValueError, match=r"CUDA build of torch, or write `device: cpu`"):
        open_device(kind, has_gpu=has_gpu)


def test_a_gpu_reports_its_memory_and_caps_the_process_at_its_share(
    gpu: list[tuple[float, int]],
) -> None:
    device = CudaDevice()
    assert (device.name, device.total_bytes) == ("A GPU", 80 * 2**30)
    assert device.torch_device == torch.device("cuda:0")
    device.enforce_share(0.5)
    assert gpu == [(0.5, 0)]


def test_a_cpu_offers_the_memory_that_is_free_and_caps_nothing() -> None:
    device = CpuDevice()
    device.enforce_share(0.1)
    assert 0 < device.total_bytes <= psutil.virtual_memory().total
    assert device.torch_device == torch.device("cpu")
    assert device.name.startswith("CPU")


def test_a_container_s_memory_limit_bounds_the_machine_s_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroup, "free_bytes", lambda: 12345)
    assert CpuDevice().total_bytes == 12345


@for_each((1, None, 1), (2, None, 1), (8, None, 7), (64, 4.0, 3), (64, 0.5, 1), (4, 8.0, 3))
def test_a_small_model_leaves_one_allowed_core_to_http_and_a_large_one_takes_all(
    num_cores: int, allowed: float | None, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "num_cores", lambda found=allowed: found)
    cores = set(range(num_cores))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid, found=cores: found)
    assert num_compute_threads(LARGE_MODEL_BYTES - 1) == num_threads
    assert num_compute_threads(LARGE_MODEL_BYTES) == min(num_cores, ceil(allowed or num_cores))


def test_where_no_process_is_bound_to_cores_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(cgroup, "num_cores", lambda: None)
    assert num_cores() == 3
