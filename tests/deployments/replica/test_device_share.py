import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from deployments.compute.model_files import wrap_load_errors
from deployments.contract.telemetry.memory_report import MemoryUse
from deployments.device.device import CpuDevice, CudaDevice, num_compute_threads, num_cores
from deployments.engine.model.loader import load_config
from deployments.generator import placed_engine
from deployments.generator.placed_engine import place_engine
from deployments.plan import cgroup
from deployments.plan.memory_budget import GIB, DeviceMemoryError, ModelTooLargeError
from deployments.plan.replica_plan import plan_replica
from deployments.plan.replica_report import MeasuredMemory, MemoryPlan
from deployments.plan.sizes import DeviceMemory
from deployments.replica import device_share
from deployments.replica.device_share import (
    confine_to_share,
    log_sizes,
    measure_memory,
    plan_share,
    set_compute_threads,
)
from tests.deployments.tiny_folder import save_text_model, spec
from tests.failing import failing
from tests.hub_configs import config_file, shape_of

LARGE_BYTES = 1000

pytestmark = pytest.mark.usefixtures("threads")


@pytest.mark.parametrize(("num_gpus", "share"), [(0.25, 0.25), (1.0, 1.0), (0.0, 1.0)])
def test_the_process_is_capped_at_its_share_and_loads_on_every_core(
    monkeypatch: pytest.MonkeyPatch, num_gpus: float, share: float
) -> None:
    enforced: list[float] = []
    monkeypatch.setattr(CpuDevice, "enforce_share", lambda _, share: enforced.append(share))
    confine_to_share(spec("m", num_gpus=num_gpus), CpuDevice())
    assert enforced == [share]
    assert torch.get_num_threads() == num_cores()


def test_the_number_of_threads_is_the_spec_s() -> None:
    assert set_compute_threads(spec("m", num_threads=3), LARGE_BYTES, LARGE_BYTES) == 3
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("weight_bytes", [LARGE_BYTES - 1, LARGE_BYTES])
def test_without_a_number_in_the_spec_the_weights_decide(weight_bytes: int) -> None:
    chosen = set_compute_threads(spec("m"), weight_bytes, LARGE_BYTES)
    assert chosen == num_compute_threads(weight_bytes, LARGE_BYTES) == torch.get_num_threads()


@dataclass(frozen=True)
class FakeGpu:
    """A GPU of a given size that keeps its tensors on the CPU."""

    total_bytes: int
    foreign_bytes: int = 0
    name: str = "a fake GPU"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("meta")

    def enforce_share(self, share: float) -> None:
        pass


def test_what_a_start_has_measured_stands_beside_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = spec("m", dtype="auto")
    plan = plan_replica(entry, shape_of("qwen2.5-7b-instruct"), DeviceMemory(48 * GIB))
    assert measure_memory(FakeGpu(48 * GIB), 14 * GIB) is None
    use = MemoryUse(peak_bytes=42 * GIB, process_bytes=43 * GIB)
    monkeypatch.setattr(device_share, "memory_reader", lambda device: lambda: use)
    measured = measure_memory(CudaDevice(), 14 * GIB, GIB // 4)
    assert measured == MeasuredMemory(14 * GIB, GIB // 4, 42 * GIB, 43 * GIB)
    memory = MemoryPlan.of(plan, measured)
    planned = memory.weight_bytes + memory.step_bytes + memory.kv_bytes
    assert memory.comparison == (
        "memory, planned / measured so far: weights 14.18 / 14.00 GiB, captured steps "
        f"{memory.captured_bytes / GIB:.2f} / 0.25 GiB, all tensors {planned / GIB:.2f} / "
        "42.00 GiB; the process holds 43.00 GiB"
    )
    assert MemoryPlan.of(plan).comparison is None


def folder_of(name: str, tmp_path: Path) -> Path:
    """Return a folder with a configuration, and no weights."""
    shutil.copy(config_file(name), tmp_path / "config.json")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "gib", "share"),
    [("gemma-3-12b-it", 24, 1.0), ("gemma-3-12b-it", 48, 0.5), ("qwen2.5-7b-instruct", 24, 0.5)],
)
def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, gib: int, share: float
) -> None:
    monkeypatch.setattr(placed_engine, "load_model", lambda *_, **__: pytest.fail("it loads"))
    entry = spec(folder_of(name, tmp_path), num_gpus=share, dtype="auto")
    with pytest.raises(DeviceMemoryError, match=r"GiB for weights.*; (give it|raise num_gpus)"):
        place_engine(entry, FakeGpu(gib * GIB))


def test_a_share_that_is_too_small_by_itself_is_told_from_memory_that_others_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_of("qwen2.5-7b-instruct", tmp_path)
    config = load_config(str(source), revision=None)
    entry = spec(source, dtype="auto", num_gpus=1.0)
    with pytest.raises(ModelTooLargeError, match=r"give it a device of 1\d\.\d GiB"):
        plan_share(entry, config, FakeGpu(12 * GIB))
    with pytest.raises(DeviceMemoryError, match="end what else holds memory") as caught:
        plan_share(entry, config, FakeGpu(24 * GIB, foreign_bytes=12 * GIB))
    assert not isinstance(caught.value, ModelTooLargeError)

    # A CPU's share is of what is free now, which may become more up to the whole.
    monkeypatch.setattr(cgroup, "available_bytes", lambda: 12 * GIB)
    for whole_gib, kind in ((12, ModelTooLargeError), (64, DeviceMemoryError)):
        monkeypatch.setattr(cgroup, "total_bytes", lambda whole_gib=whole_gib: whole_gib * GIB)
        with pytest.raises(DeviceMemoryError) as caught:
            plan_share(replace(entry, num_gpus=0.0), config, CpuDevice())
        assert type(caught.value) is kind


def test_a_container_s_limit_is_the_machine_of_a_cpu_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(f"{40 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    monkeypatch.setattr(cgroup.total_bytes, "__defaults__", (tmp_path,))
    monkeypatch.setattr(cgroup.memory, "__defaults__", (tmp_path,))
    monkeypatch.setattr(cgroup.free_bytes, "__defaults__", (tmp_path,))
    machine = SimpleNamespace(total=512 * GIB, available=500 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    source = folder_of("qwen2.5-7b-instruct", tmp_path)
    entry = spec(source, dtype="bfloat16", num_gpus=0.0, max_model_len=32_768, max_num_seqs=64)
    plan = plan_share(entry, load_config(str(source), revision=None), CpuDevice())
    assert plan.device.total_bytes == 39 * GIB
    assert 9.9 * GIB < plan.kv.kv_bytes <= 10 * GIB


@pytest.mark.parametrize("gib", [24, 48, 80])
def test_a_model_is_loaded_with_the_sizes_that_were_chosen_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gib: int
) -> None:
    caplog.set_level("INFO", "ray.serve.raystream.replica")
    source = folder_of("qwen2.5-7b-instruct", tmp_path)
    sizes = dict.fromkeys(("max_model_len", "max_num_seqs", "max_batched_tokens"), "auto")
    entry = spec(source, dtype="auto", num_gpus=0.95, **sizes)
    config = load_config(str(source), revision=None)
    plan = plan_share(entry, config, FakeGpu(gib * GIB))
    log_sizes(plan)
    assert plan.sizes.max_model_len == 32_768
    assert "tiny: max_model_len auto is 32768: the model's own limit" in caplog.messages


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    )]
)  # fmt: skip
@pytest.mark.parametrize("when", ["load_model", "Engine"])
def test_whenever_memory_runs_out_the_error_is_of_one_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, when: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        with wrap_load_errors("m"):
            raise error

    monkeypatch.setattr(placed_engine, when, fail)
    with pytest.raises(
        DeviceMemoryError, match="memory ran out, although a share of 1 of"
    ) as caught:
        place_engine(spec(save_text_model(tmp_path)), CpuDevice())
    assert caught.value.__cause__ is error


def test_the_line_of_a_replica_says_what_is_needed_at_start_and_reserved_at_most(
    tmp_path: Path,
) -> None:
    source = save_text_model(tmp_path)
    placed = place_engine(spec(source, max_num_seqs=64, max_model_len=128), CpuDevice())
    start, most = placed.plan.start_bytes / GIB, placed.plan.most_bytes / GIB
    told = f"; memory: {start:.2f} GiB needed at start, {most:.2f} GiB reserved at most"
    assert placed.summary.endswith(told)
    assert placed.engine.kv_bytes == placed.plan.most_bytes - placed.plan.start_bytes


def test_other_errors_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed_engine, "Engine", failing(KeyError("something else")))
    with pytest.raises(KeyError):
        place_engine(spec(save_text_model(tmp_path)), CpuDevice())
