import os
from dataclasses import dataclass, field
from pathlib import Path

import ray
import torch
from ray import serve

from deployments.device.device import MemoryDevice
from deployments.device.memory_budget import HEADROOM
from deployments.model_spec import ModelSpec
from deployments.replica_plan import ReplicaPlan
from deployments.text_generator import TextGenerator
from serve_app.config import ModelConfig
from serve_app.sharing import to_spec

TOTAL_BYTES = 256 * 2**20


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
    return FakeGpu()


@dataclass(frozen=True)
class Report:
    """A replica's memory plan and placement."""

    plan: ReplicaPlan
    shares: list[float]
    gpu_ids: list[str]
    process: int


class ReportingGenerator(TextGenerator):
    """Reports its memory plan."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, open_fake_gpu)

    async def report(self) -> Report:
        context = ray.get_runtime_context()
        device = self._device
        assert isinstance(device, FakeGpu)
        gpu_ids = context.get_accelerator_ids()["GPU"]
        return Report(self.plan, device.shares, gpu_ids, os.getpid())


def test_two_replicas_with_half_a_gpu_share_one_and_each_plans_with_half(
    base_url: str, tiny_folder: Path
) -> None:
    model = ModelConfig(
        id="halved",
        source=str(tiny_folder),
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=10_000,
        max_batched_tokens=10_000,
    )
    spec = to_spec(model, 0.5)
    deployment = serve.deployment(
        name="halved",
        num_replicas=2,
        ray_actor_options={"num_cpus": 0.5, "num_gpus": spec.num_gpus},
    )(ReportingGenerator)
    handle = serve.run(deployment.bind(spec), name="halved", route_prefix=None)
    try:
        reports: dict[int, Report] = {}
        for _ in range(100):
            report = handle.report.remote().result(timeout_s=30)
            reports[report.process] = report
            if len(reports) == 2:
                break
        first, second = reports.values()
    finally:
        serve.delete("halved")
    assert first.gpu_ids == second.gpu_ids == ["0"]
    assert first.shares == second.shares == [0.5]
    assert first.plan == second.plan
    assert first.plan.kv.share_bytes == int(TOTAL_BYTES * 0.5 * (1 - HEADROOM))
    assert first.plan.kv.kv_bytes <= TOTAL_BYTES / 2
    assert first.plan.kv.num_tokens > 2 * 4096
