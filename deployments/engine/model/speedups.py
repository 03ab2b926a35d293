"""What a device computes faster than by torch's operators, chosen where the engine is composed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deployments.compute.kv_rows import AttendRows
from deployments.engine.attention.kv_cache import KVCache
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.replay.decode_replay import Attend, DecodeReplay


@dataclass(frozen=True, slots=True)
class Speedups:
    """A device's own kernels, for the parts of an engine that can use them.

    Attributes:
        find_attention: Returns the kernel for attention in place over heads of a size and dtype.
        speed_up: Makes a traced graph use the kernels; returns a copy with fused operators too, or
            None if none can be fused.
        open_replay: Returns the replay of a graph with fused operators on a KV cache, for steps of
            at most this many rows, and with the attention that the function returns for a step.
    """

    find_attention: Callable[[int, torch.dtype], AttendRows | None]
    speed_up: Callable[[torch.fx.GraphModule], torch.fx.GraphModule | None]
    open_replay: Callable[
        [torch.fx.GraphModule, KVCache, int, Callable[[PackedStep], Attend]], DecodeReplay
    ]


def find_speedups(device: torch.device) -> Speedups | None:
    """Return the speed-ups for a device; None if it has none."""
    if device.type != "cpu":
        return None
    # Imported here: these need llvmlite, which a machine with a GPU may lack.
    from deployments.compute.cpu.attention.row_attention import find_row_attention
    from deployments.compute.cpu.traced_kernels import use_kernels
    from deployments.engine.replay.cpu_replay import CpuDecodeReplay

    return Speedups(find_row_attention, use_kernels, CpuDecodeReplay)
