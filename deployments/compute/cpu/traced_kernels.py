"""Makes a traced model on a CPU use this project's kernels."""

import torch

from deployments.compute.cpu.fusion.fuse import fuse
from deployments.compute.cpu.linear.small_batch_linear import use_small_batch_linear


def use_kernels(graph: torch.fx.GraphModule) -> torch.fx.GraphModule | None:
    """Make a graph use the kernels of linear layers.

    Args:
        graph: Traced by `trace_graph`; its weights are packed.

    Returns:
        A copy with fused operators too; None if none can be fused.
    """
    fused = fuse(graph)
    for each in filter(None, (graph, fused)):
        use_small_batch_linear(each)
    return fused
