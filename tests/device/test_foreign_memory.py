"""Memory of other processes on a device, and its effect on the plan."""

import pytest
import torch

from deployments.device.device import CpuDevice, CudaDevice
from deployments.device.memory_budget import (
    GIB,
    GRAPH_LAYER_BYTES,
    DeviceMemoryError,
    MemoryDemand,
    graph_bytes,
    plan_kv_slots,
)

DEMAND = MemoryDemand(weight_bytes=15 * GIB, activation_bytes=GIB, slot_bytes=GIB // 2)


def num_slots(share: float, *, foreign: int, graphs: int = 0) -> int:
    demand = MemoryDemand(DEMAND.weight_bytes, DEMAND.activation_bytes, DEMAND.slot_bytes, graphs)
    return plan_kv_slots(
        total_bytes=80 * GIB, share=share, demand=demand, max_num_seqs=256, foreign_bytes=foreign
    ).num_slots


def test_memory_that_torch_does_not_hold_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 20 * GIB)
    assert CudaDevice().foreign_bytes == 10 * GIB
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 31 * GIB)
    assert CudaDevice().foreign_bytes == 0


def test_on_a_cpu_nothing_is_foreign() -> None:
    assert CpuDevice().foreign_bytes == 0


def test_a_neighbour_within_its_share_costs_no_slots() -> None:
    # 80 GiB x 0.5, less a tenth, is 36 GiB; 20 GiB of them are left.
    assert num_slots(0.5, foreign=0) == num_slots(0.5, foreign=40 * GIB) == 40


def test_a_neighbour_beyond_its_share_leaves_less() -> None:
    # 30 GiB, less a tenth, is 27 GiB; 11 GiB of them are left.
    assert num_slots(0.5, foreign=50 * GIB) == 22
    with pytest.raises(DeviceMemoryError, match=r"others hold 81\.00 GiB, leaves 0\.00 GiB"):
        num_slots(0.5, foreign=81 * GIB)


def test_captured_steps_cost_slots() -> None:
    assert num_slots(0.5, foreign=0, graphs=2 * GIB) == 36
    with pytest.raises(DeviceMemoryError, match=r"30\.00 GiB for captured steps.*cuda_graphs off"):
        num_slots(0.5, foreign=0, graphs=30 * GIB)


def test_graphs_cost_by_layer_and_share_a_pool_and_a_buffer() -> None:
    planned = graph_bytes(num_graphs=3, num_layers=4, decode_bytes=1000, num_logits=50, itemsize=2)
    assert planned == 12 * GRAPH_LAYER_BYTES + 1000 + 100
