"""Products of few rows and large weights on a GPU, as decode steps have them.

They take as long as the weights take to be read. Of the memory's bandwidth, cuBLAS reached 0.80 to
0.92 on an H100, and this kernel 0.85 to 0.99. With small weights cuBLAS is as fast or faster, so
those are left to it, as are products of many rows.
"""

import logging

import torch

from deployments.compute.gpu.kernels import multiply_rows
from deployments.compute.gpu.launch import on_its_gpu

logger = logging.getLogger(__name__)

aten = torch.ops.aten

MAX_ROWS = 32
"""The most rows that a program multiplies by its block."""

LEAST_BYTES = 2**26
"""The smallest weights that are worth it."""

BLOCK_INPUTS = 256

WIDE_BLOCK, NARROW_BLOCK = 64, 32
"""Rows of the weights that a program reads. Narrow ones keep all processors busy if the weights
have few rows."""

LEAST_WIDE_BLOCKS = 256
"""Wide blocks from which on there are enough of them."""

TOLERANCE = 2**-7
"""Allowed difference from torch's products, relative to the largest of them: both round to bfloat16
once, after sums in different order."""


def can_multiply(weight: torch.Tensor) -> bool:
    """Return whether `multiply` takes weights [width, inputs], and is worth it."""
    width, num_inputs = weight.shape
    return (
        weight.dtype is torch.bfloat16
        and weight.is_contiguous()
        and weight.nbytes >= LEAST_BYTES
        and width % WIDE_BLOCK == 0
        and num_inputs % BLOCK_INPUTS == 0
    )


@on_its_gpu
def multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the product of rows [n, inputs] and the transpose of weights [width, inputs].

    Args:
        rows: On the weight's device.
        weight: See `can_multiply`.
    """
    num_rows, (width, num_inputs) = len(rows), weight.shape
    if not 0 < num_rows <= MAX_ROWS:
        return rows @ weight.t()
    output = rows.new_empty(num_rows, width)
    is_wide = _has_wide_blocks(weight)
    block = WIDE_BLOCK if is_wide else NARROW_BLOCK
    multiply_rows[(width // block,)](
        rows.contiguous(),
        weight,
        output,
        num_rows,
        width,
        num_inputs,
        block_rows=16 if num_rows <= 16 else MAX_ROWS,
        block=block,
        block_inputs=BLOCK_INPUTS,
        num_warps=4,
        num_stages=3 if is_wide else 4,
    )
    return output


def _has_wide_blocks(weight: torch.Tensor) -> bool:
    return len(weight) >= LEAST_WIDE_BLOCKS * WIDE_BLOCK


@torch.inference_mode()
def are_right(weight: torch.Tensor) -> bool:
    """Return whether `multiply` gives torch's products with weights, for few rows and for most."""
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, MAX_ROWS):
        random = torch.randn(num_rows, weight.shape[1], generator=generator)
        rows = random.to(weight.device, weight.dtype)
        found, expected = multiply(rows, weight).float(), (rows @ weight.t()).float()
        # False for NaN.
        if not (found - expected).abs().max() <= TOLERANCE * expected.abs().max():
            return False
    return True


def use_row_products(graph: torch.fx.GraphModule) -> None:
    """Let `multiply` compute a graph's products with large weights, in place, if they are right.

    One weight of each size of blocks is tried, before anything is replaced.

    Args:
        graph: Traced by `trace_graph`, on a GPU; its products have no bias.
    """
    products = list[tuple[torch.fx.Node, torch.fx.Node, torch.fx.Node]]()
    tried = dict[bool, torch.Tensor]()
    for node in graph.graph.nodes:
        if node.target is not aten.mm.default:
            continue
        rows, transposed = node.args
        if transposed.target is not aten.t.default:
            continue
        (source,) = transposed.args
        if source.op != "get_attr":
            continue
        weight = getattr(graph, source.target)
        if can_multiply(weight):
            products.append((node, rows, source))
            tried.setdefault(_has_wide_blocks(weight), weight)
    if not all(map(are_right, tried.values())):
        logger.warning("products of few rows are torch's: ours differ")
        return
    for node, rows, source in products:
        with graph.graph.inserting_before(node):
            product = graph.graph.call_function(multiply, (rows, source))
        product.meta = dict(node.meta)
        node.replace_all_uses_with(product)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
