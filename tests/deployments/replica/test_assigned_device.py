from dataclasses import replace

import pytest
import ray
import torch

from deployments.contract.model_spec import ModelConfig, ModelSpec
from deployments.device.device import CpuDevice, CudaDevice
from deployments.device.process_tree import RankGpus
from deployments.replica import assigned_device
from deployments.replica.assigned_device import open_assigned_device, open_watched_device
from tests.deployments.tiny_folder import spec


class FakeContext:
    """What Ray tells a worker about its resources."""

    def __init__(self, resources: dict[str, float]) -> None:
        self._resources = resources

    def get_assigned_resources(self) -> dict[str, float]:
        return self._resources


def assign(monkeypatch: pytest.MonkeyPatch, resources: dict[str, float]) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(assigned_device, "get_runtime_context", lambda: FakeContext(resources))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_without_ray_the_entry_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert open_assigned_device(spec("m", num_gpus=0.0, device="auto")) == CpuDevice()


def test_a_replica_to_which_ray_gives_no_gpu_runs_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assign(monkeypatch, {"CPU": 1.0})
    assert open_assigned_device(spec("m", num_gpus=0.0, device="auto")) == CpuDevice()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("share", [0.5, 0.3333, 1.0])
def test_a_replica_with_its_share_of_a_gpu_runs_on_it(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    assign(monkeypatch, {"CPU": 1.0, "GPU": share})
    assert open_assigned_device(spec("m", num_gpus=share, device="auto")) == CudaDevice()


@pytest.mark.usefixtures("gpu")
def test_a_share_within_rays_resolution_is_the_same_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assign(monkeypatch, {"GPU": 0.3333})
    assert open_assigned_device(spec("m", num_gpus=1 / 3, device="auto")) == CudaDevice()


@pytest.mark.parametrize(("asked", "given"), [(0.5, 0.0), (0.0, 1.0), (0.25, 0.5)])
def test_a_share_that_differs_from_the_entry_s_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: float, given: float
) -> None:
    assign(monkeypatch, {"GPU": given} if given else {})
    says = f"asks for num_gpus {asked:g}, but Ray has reserved {given:g}: `ray_actor_options`"
    with pytest.raises(ValueError, match=says):
        open_assigned_device(spec("m", num_gpus=asked, device="auto"))


@pytest.mark.usefixtures("gpu")
def test_a_model_of_a_light_group_has_its_part_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    member = replace(spec("m", num_gpus=1.0, device="auto"), turn_group="card", num_turns=3)
    monkeypatch.setattr(assigned_device, "require_own_card", lambda spec: None)
    assign(monkeypatch, {"GPU": 0.3333})
    assert open_assigned_device(member) == CudaDevice()
    assign(monkeypatch, {"GPU": 1.0})
    says = r"asks for num_gpus 0.3333, a part for each of 3 light turns, but Ray has reserved 1:"
    with pytest.raises(ValueError, match=says):
        open_assigned_device(member)


def test_a_replica_whose_workers_ray_starts_has_none_of_their_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    entry = {"id": "m", "source": "x", "engine": "vllm", "engine_args": args}
    divided = ModelSpec(ModelConfig.model_validate(entry), "x", 2.0)
    assign(monkeypatch, {"CPU": 1.0})
    assert open_watched_device(divided) == RankGpus(2)
    assign(monkeypatch, {"CPU": 1.0, "GPU": 2.0})
    with pytest.raises(ValueError, match="asks for num_gpus 0, but Ray has reserved 2"):
        open_watched_device(divided)
