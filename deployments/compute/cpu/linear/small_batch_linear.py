"""A prepacked linear layer whose kernel is made for the small batch of a decode step.

It reads the weights that oneDNN has packed, so no weight is in memory twice. oneDNN's own kernel
computes and waits for memory in turn. This one does both at once: see `small_batch_kernel`. It also
takes large batches, where oneDNN is as fast, because oneDNN adds in another order: prefilled tokens
would differ from decoded ones in the last bit.
"""

import ctypes
from functools import cache

import torch

from deployments.compute.cpu.jit.launch import KernelCall, empty, launch
from deployments.compute.cpu.jit.openmp import find_parallel
from deployments.compute.cpu.linear.prepacked_linear import BATCH_HINT
from deployments.compute.cpu.linear.small_batch_kernel import (
    ARGUMENTS,
    BLOCK,
    CACHE_LINE,
    GROUP_ROWS,
    PAIR_BYTES,
    UNROLLED,
    SmallBatchKernel,
    Tiling,
    make_kernel,
)

MAX_INPUTS = 5120
"""The most inputs of a layer: with more, two blocks would not fit into a core's L2 cache."""

INPUT_BLOCK = 32
"""oneDNN pads the inputs to a multiple of this."""

UNITS_PER_THREAD = 4
"""Units of work for each thread, so that one that has lost its core delays the others little."""

PRODUCTS_PER_US = 200_000
"""Products that one thread computes in a microsecond, unless it waits for the weights."""

Arguments = ctypes.c_int64 * len(ARGUMENTS)

_linear = torch.ops.mkldnn._linear_pointwise.default


class SmallBatchLinear(torch.nn.Module):
    """A linear layer on weights that oneDNN has packed."""

    def __init__(
        self,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        kernel: SmallBatchKernel,
    ) -> None:
        """Use a packed weight in place.

        Args:
            packed: [out_features, in_features], bfloat16, packed by oneDNN; see `can_read`.
            bias: [out_features], or None.
            kernel: The compiled kernel.
        """
        super().__init__()
        # Not a buffer: an opaque layout can be neither saved nor moved.
        self._packed, self._bias = packed, bias
        self._kernel = kernel
        self._out_features, self._in_features = packed.shape
        self._weights = torch.ops.mkldnn.data_ptr(packed)
        wide = torch.zeros(self._out_features) if bias is None else bias.float().contiguous()
        self._wide_bias = wide

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the layer to [..., in_features], bfloat16."""
        num_rows = rows.numel() // self._in_features
        rows = rows.contiguous()
        output = empty((*rows.shape[:-1], self._out_features), rows.dtype)
        if num_rows:
            num_threads = torch.get_num_threads()
            is_small = num_rows < 2 * GROUP_ROWS
            num_groups = 1 if is_small else self._num_groups(num_rows, num_threads)
            arguments = self._arguments(rows.data_ptr(), output.data_ptr(), num_rows, num_groups)
            num_products = num_rows * self._in_features * self._out_features
            call = KernelCall(self._kernel.address, arguments)
            launch(call, num_threads, num_products / PRODUCTS_PER_US)
        return output

    def _num_groups(self, num_rows: int, num_threads: int) -> int:
        """Return how many groups of rows keep all threads busy: one, if blocks are many."""
        wanted = UNITS_PER_THREAD * num_threads * BLOCK // self._out_features
        return max(1, min(num_rows // GROUP_ROWS, wanted))

    def _arguments(
        self, rows: int, output: int, num_rows: int, num_groups: int
    ) -> ctypes.Array[ctypes.c_int64]:
        tiling = Tiling.of(num_rows)
        num_tiles = -(-tiling.num_tiles // num_groups)
        num_turns = self._in_features // (2 * UNROLLED)
        return Arguments(
            rows,
            2 * self._in_features,
            self._weights,
            PAIR_BYTES // 2 * self._in_features,
            num_turns,
            output,
            2 * self._out_features,
            self._wide_bias.data_ptr(),
            self._out_features // BLOCK * num_groups,
            self._kernel.tiles[tiling.name],
            num_tiles,
            tiling.tile_rows,
            num_rows,
            num_turns * CACHE_LINE * tiling.lines,
            num_groups,
            0,
        )


def use_small_batch_linear(graph: torch.fx.GraphModule) -> None:
    """Replace a traced graph's linear layers by this kernel, where it can read their weights.

    Args:
        graph: Calls torch's operators, and holds its weights as attributes.
    """
    kernel = make_kernel()
    if kernel is None or find_parallel() is None:
        return
    for index, node in enumerate(graph.graph.find_nodes(op="call_function", target=_linear)):
        rows, weight, bias, activation, *_ = node.args
        packed = _attribute(graph, weight)
        if activation != "none" or not can_read(packed):
            continue
        name = f"small_batch_linear_{index}"
        layer = SmallBatchLinear(packed, bias and _attribute(graph, bias), kernel)
        graph.add_submodule(name, layer)
        node.op, node.target, node.args = "call_module", name, (rows,)
    graph.graph.eliminate_dead_code()


def can_read(packed: torch.Tensor) -> bool:
    """Return whether the kernel can read a packed weight, [out_features, in_features].

    oneDNN chooses a layout for the machine and does not report it. The sizes accepted here need no
    padding, so layouts do not differ in their number of bytes. A small weight with known elements
    shows which one it is.
    """
    out_features, in_features = packed.shape
    return (
        packed.dtype is torch.bfloat16
        and out_features % BLOCK == 0
        and in_features % INPUT_BLOCK == 0
        and in_features <= MAX_INPUTS
        and _is_known_layout(packed)
    )


def _is_known_layout(packed: torch.Tensor) -> bool:
    num_bytes = torch.ops.mkldnn._nbytes(packed)
    return bool(num_bytes == 2 * packed.numel()) and _packs_in_blocks()


@cache
def _packs_in_blocks() -> bool:
    """Return whether oneDNN packs in the layout that the kernel reads."""
    weight = torch.arange(2 * BLOCK * BLOCK, dtype=torch.int16).view(torch.bfloat16)
    weight = weight.view(2 * BLOCK, BLOCK)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, BATCH_HINT)
    found = ctypes.string_at(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    blocks = weight.view(2, BLOCK, BLOCK // 2, 2).transpose(1, 2).contiguous()
    return found == blocks.view(torch.uint8).numpy().tobytes()


def _attribute(graph: torch.fx.GraphModule, node: object) -> torch.Tensor:
    assert isinstance(node, torch.fx.Node)
    assert isinstance(node.target, str)
    found = getattr(graph, node.target)
    assert isinstance(found, torch.Tensor)
    return found
