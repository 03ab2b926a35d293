"""Products of few rows and large weights on a GPU, as decode steps have them.

They take as long as the weights take to be read. Of the memory's bandwidth, cuBLAS reached 0.80 to
0.92 on an H100, and this kernel 0.85 to 0.99. With small weights cuBLAS is as fast or faster, so
those are left to it, as are products of many rows.
"""

import torch

from deployments.compute.gpu.kernels import multiply_rows

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
    is_wide = width >= LEAST_WIDE_BLOCKS * WIDE_BLOCK
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


def use_row_products(graph: torch.fx.GraphModule) -> None:
    """Let `multiply` compute a graph's products with large weights, in place.

    Args:
        graph: Traced by `trace_graph`, on a GPU; its products have no bias.
    """
    for node in list(graph.graph.nodes):
        if node.target is not aten.mm.default:
            continue
        rows, transposed = node.args
        if transposed.target is not aten.t.default:
            continue
        (source,) = transposed.args
        if source.op != "get_attr" or not can_multiply(getattr(graph, source.target)):
            continue
        with graph.graph.inserting_before(node):
            product = graph.graph.call_function(multiply, (rows, source))
        product.meta = dict(node.meta)
        node.replace_all_uses_with(product)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
