from dataclasses import dataclass, field
from pathlib import Path

import ray
import torch
from ray import serve
from ray.serve.api import RunTarget
from ray.serve.deployment import Application
from ray.serve.handle import DeploymentHandle

from deployments.contract.model_spec import ModelConfig, ModelSpec
from deployments.device.device import MemoryDevice
from deployments.plan.memory_budget import HEADROOM
from deployments.plan.replica_report import MemoryPlan
from deployments.replica.own_card import require_own_card
from deployments.text_generator import TextGenerator
from serve_app.gpu_shares import to_spec, with_turns

TOTAL_BYTES = 256 * 2**20
DEADLINE_S = 30


@dataclass
class FakeGpu:
    """A GPU of a given size that keeps its tensors on the CPU."""

    shares: list[float] = field(default_factory=list)
    name: str = "a fake GPU"
    total_bytes: int = TOTAL_BYTES
    foreign_bytes: int = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def enforce_share(self, share: float) -> None:
        self.shares.append(share)


def open_fake_gpu(spec: ModelSpec) -> MemoryDevice:
    assert spec.num_gpus > 0
    require_own_card(spec)
    return FakeGpu()


@dataclass(frozen=True)
class Report:
    """A replica's memory plan and placement."""

    memory: MemoryPlan
    shares: list[float]
    gpu_ids: list[str]


class ReportingGenerator(TextGenerator):
    """Reports its memory plan."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, open_fake_gpu)

    async def report(self) -> Report:
        context = ray.get_runtime_context()
        device = self._device
        assert isinstance(device, FakeGpu)
        gpu_ids = context.get_accelerator_ids()["GPU"]
        return Report(self._facts.memory, device.shares, gpu_ids)


def bound(spec: ModelSpec, num_replicas: int = 1) -> Application:
    """Return the deployment of a model."""
    deployment = serve.deployment(
        name=spec.id,
        num_replicas=num_replicas,
        ray_actor_options={"num_cpus": 0.1, "num_gpus": spec.num_own_gpus},
    )(ReportingGenerator)
    return deployment.bind(spec)


def deployed(model: ModelConfig, share: float, num_replicas: int) -> RunTarget:
    """Return an application of replicas that have this share of a GPU."""
    spec = to_spec(model, share)
    return RunTarget(bound(spec, num_replicas), name=model.id, route_prefix=None)


def test_two_halves_share_a_gpu_and_plan_with_half_and_a_whole_one_has_its_own(
    base_url: str, tiny_folder: Path
) -> None:
    half = ModelConfig(
        id="half",
        source=str(tiny_folder),
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=10_000,
        max_batched_tokens=10_000,
    )
    whole = half.model_copy(update={"id": "whole"})
    handles = serve.run_many([deployed(half, 0.5, num_replicas=2), deployed(whole, 1, 1)])
    first, second, other = (
        report
        for handle in handles
        for report in handle.broadcast("report").results(timeout_s=DEADLINE_S)
    )
    for name in ("half", "whole"):
        serve.delete(name)  # the next test needs their cards
    assert first.gpu_ids == second.gpu_ids != other.gpu_ids
    assert len(other.gpu_ids) == 1
    assert first.shares == second.shares == [0.5]
    assert other.shares == [1]
    assert first.memory == second.memory
    for report, share in ((first, 0.5), (other, 1)):
        assert report.memory.usable_bytes == int(TOTAL_BYTES * share * (1 - HEADROOM))
        assert report.memory.kv_bytes <= TOTAL_BYTES * share
    assert first.memory.num_kv_tokens > 2 * 4096


class Probe:
    """A model's replica as far as its place goes."""

    def __init__(self, spec: ModelSpec) -> None:
        require_own_card(spec)

    async def gpu_ids(self) -> list[str]:
        return own_gpu_ids()


class Members:
    """Binds the models of a group in one application."""

    def __init__(self, *handles: DeploymentHandle[Probe]) -> None:
        self._handles = handles

    async def gpu_ids(self) -> list[list[str]]:
        return [await handle.gpu_ids.remote() for handle in self._handles]


def own_gpu_ids() -> list[str]:
    return list(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def gpu_ids_of_group(*ids: str) -> list[list[str]]:
    """Serve these of three models that take light turns on a whole card; return their GPUs."""
    group = ("one", "two", "three")
    specs = with_turns(
        {id_: to_spec(ModelConfig(id=id_, source="x", num_gpus=1.0), 1.0) for id_ in group},
        "card",
        group,
    )
    members = [
        serve.deployment(
            name=id_, ray_actor_options={"num_cpus": 0.1, "num_gpus": specs[id_].num_own_gpus}
        )(Probe).bind(specs[id_])
        for id_ in ids
    ]
    application = serve.deployment(name="members", ray_actor_options={"num_cpus": 0.1})(Members)
    handle = serve.run(application.bind(*members), name="light", route_prefix=None)
    found: list[list[str]] = handle.gpu_ids.remote().result(timeout_s=DEADLINE_S)
    return found


def test_models_of_a_light_group_are_on_one_card(base_url: str) -> None:
    try:
        one, *others = gpu_ids_of_group("one", "two", "three")
        assert others == [one, one]
    finally:
        serve.delete("light")
