"""Memory of other processes on a device, and its effect on the plan."""

from dataclasses import replace

import pytest
import torch

from deployments.device.device import CpuDevice, CudaDevice
from deployments.plan.memory_budget import (
    GIB,
    GRAPH_LAYER_BYTES,
    DeviceMemoryError,
    GroupDemand,
    MemoryDemand,
    graph_bytes,
    plan_kv_blocks,
)

DEMAND = MemoryDemand(
    weight_bytes=15 * GIB,
    activation_bytes=GIB,
    groups=(GroupDemand(capacity=512, token_bytes=GIB // 512, block_size=256),),
)


def num_blocks(share: float, *, foreign: int, graphs: int = 0) -> int:
    """Return how many blocks of half a GiB are planned."""
    plan = plan_kv_blocks(
        total_bytes=80 * GIB,
        share=share,
        demand=replace(DEMAND, graph_bytes=graphs),
        max_num_seqs=256,
        foreign_bytes=foreign,
    )
    return plan.kv_blocks[0]


def test_memory_that_torch_does_not_hold_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 20 * GIB)
    assert CudaDevice().foreign_bytes == 10 * GIB
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 31 * GIB)
    assert CudaDevice().foreign_bytes == 0


def test_on_a_cpu_nothing_is_foreign() -> None:
    assert CpuDevice().foreign_bytes == 0


def test_a_neighbour_within_its_share_costs_no_blocks() -> None:
    # 80 GiB x 0.5, less a tenth, is 36 GiB; 20 GiB of them are left.
    assert num_blocks(0.5, foreign=0) == num_blocks(0.5, foreign=40 * GIB) == 40


def test_a_neighbour_beyond_its_share_leaves_less() -> None:
    # 30 GiB, less a tenth, is 27 GiB; 11 GiB of them are left.
    assert num_blocks(0.5, foreign=50 * GIB) == 22
    with pytest.raises(DeviceMemoryError, match=r"others hold 81\.00 GiB, leaves 0\.00 GiB"):
        num_blocks(0.5, foreign=81 * GIB)


def test_captured_steps_cost_blocks() -> None:
    assert num_blocks(0.5, foreign=0, graphs=2 * GIB) == 36
    with pytest.raises(DeviceMemoryError, match=r"30\.00 GiB for captured steps.*cuda_graphs off"):
        num_blocks(0.5, foreign=0, graphs=30 * GIB)


def test_graphs_cost_by_layer_and_share_a_pool_and_a_buffer() -> None:
    planned = graph_bytes(num_graphs=3, num_layers=4, decode_bytes=1000, num_logits=50, itemsize=2)
    assert planned == 12 * GRAPH_LAYER_BYTES + 1000 + 100
