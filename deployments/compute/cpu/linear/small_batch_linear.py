"""A prepacked linear layer whose kernel is made for the small batch of a decode step.

It reads the weights that oneDNN has packed, so no weight is in memory twice. oneDNN's own kernel
computes and waits for memory in turn. This one does both at once: see `small_batch_kernel`. It also
takes large batches, where oneDNN is as fast, because oneDNN adds in another order: prefilled tokens
would differ from decoded ones in the last bit. Quantized weights are read by the same kernel.
"""

import ctypes
import logging
from functools import cache

import torch

from deployments.compute.cpu.jit.launch import KernelCall, empty, launch
from deployments.compute.cpu.jit.openmp import find_parallel
from deployments.compute.cpu.linear.packed_layout import BLOCK, can_read
from deployments.compute.cpu.linear.small_batch_kernel import (
    ARGUMENTS,
    SmallBatchKernel,
    make_kernel,
    make_quantized_kernel,
)
from deployments.compute.cpu.linear.tiling import (
    CACHE_LINE,
    GROUP_ROWS,
    MAX_GROUP_ROWS,
    UNPACKED_BYTES,
    UNROLLED,
    WORD_BYTES,
    Tiling,
)
from deployments.plan.model_shape import SCALED_INPUTS

logger = logging.getLogger(__name__)

MAX_PART_BYTES = 640 * 2**10
"""Most bytes of a block's weights that are used for all rows before the next ones: what is in use
should stay in a core's L2 cache of 1 MiB while the next is fetched."""

UNITS_PER_THREAD = 4
"""Units of work for each thread, so that one that has lost its core delays the others little."""

Arguments = ctypes.c_int64 * len(ARGUMENTS)

_linear = torch.ops.mkldnn._linear_pointwise.default


class SmallBatchLinear(torch.nn.Module):
    """A linear layer on packed weights."""

    def __init__(
        self,
        kernel: SmallBatchKernel,
        weights: torch.Tensor,
        bias: torch.Tensor | None,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Use packed weights in place.

        Args:
            kernel: The compiled kernel for the weights.
            weights: [out_features, in_features], packed by oneDNN, see `can_read`; or quantized,
                see `quantized_linear.pack`.
            bias: [out_features], or None.
            scales: [blocks, groups of inputs, columns of a block] of quantized weights, of the
                rows' type; None for others.
        """
        super().__init__()
        # Not buffers: an opaque layout can be neither saved nor moved.
        self._weights, self._scales = weights, scales
        self._kernel, self._arithmetic = kernel, kernel.arithmetic
        if scales is None:
            self._out_features, self._in_features = weights.shape
            self._addresses = torch.ops.mkldnn.data_ptr(weights), 0
            most_turns = MAX_PART_BYTES // (UNROLLED * WORD_BYTES)
        else:
            num_blocks, num_groups, _ = scales.shape
            self._out_features, self._in_features = num_blocks * BLOCK, num_groups * SCALED_INPUTS
            self._addresses = weights.data_ptr(), scales.data_ptr()
            most_turns = UNPACKED_BYTES // (UNROLLED * 4 * kernel.arithmetic.strip)
        wide = torch.zeros(self._out_features) if bias is None else bias.float().contiguous()
        self._wide_bias = wide
        self._num_turns = self._in_features // self._arithmetic.turn_inputs
        self._num_parts = -(-self._num_turns // most_turns)
        # A part of quantized weights has whole groups.
        step = 1 if scales is None else SCALED_INPUTS // self._arithmetic.turn_inputs
        self._part_turns = -(-self._num_turns // (self._num_parts * step)) * step

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the layer to [..., in_features], of the kernel's type."""
        num_rows = rows.numel() // self._in_features
        rows = rows.contiguous()
        output = empty((*rows.shape[:-1], self._out_features), rows.dtype)
        if num_rows:
            num_threads = torch.get_num_threads()
            is_small = num_rows < MAX_GROUP_ROWS
            num_groups = 1 if is_small else self._num_groups(num_rows, num_threads)
            arguments = self._arguments(rows.data_ptr(), output.data_ptr(), num_rows, num_groups)
            num_products = num_rows * self._in_features * self._out_features
            call = KernelCall(self._kernel.address, arguments)
            launch(call, num_threads, num_products / self._arithmetic.products_per_us)
        return output

    def _num_groups(self, num_rows: int, num_threads: int) -> int:
        """Return how many groups of rows keep all threads busy: one, if blocks are many.

        The sums of a layer with several parts wait in memory that holds a small group.
        """
        most = num_rows // GROUP_ROWS
        if self._num_parts > 1:
            return most
        wanted = UNITS_PER_THREAD * num_threads * BLOCK // self._out_features
        return max(1, min(most, wanted))

    def _arguments(
        self, rows: int, output: int, num_rows: int, num_groups: int
    ) -> ctypes.Array[ctypes.c_int64]:
        arithmetic = self._arithmetic
        tiling = Tiling.of(num_rows, arithmetic)
        part_turns, num_parts = self._part_turns, self._num_parts
        tiles = (
            self._kernel.tiles[tiling.name(is_last=is_last, unpacks=unpacks)]
            for unpacks in (False, self._scales is not None)
            for is_last in (False, True)
        )
        if tiling.is_wide:  # each weight is read once, so no part has to stay in a cache
            part_turns, num_parts = self._num_turns, 1
        return Arguments(
            rows,
            arithmetic.itemsize * self._in_features,
            *self._addresses,
            self._num_turns,
            part_turns,
            num_parts,
            output,
            arithmetic.itemsize * self._out_features,
            self._wide_bias.data_ptr(),
            self._out_features // BLOCK * num_groups,
            *tiles,
            -(-tiling.num_tiles // num_groups),
            tiling.tile_rows,
            num_rows,
            part_turns * CACHE_LINE * tiling.lines,
            num_groups,
            1 if tiling.is_wide else arithmetic.num_strips,
            0,
        )


def use_small_batch_linear(graph: torch.fx.GraphModule) -> None:
    """Replace a traced graph's linear layers by this kernel, where it can read their weights.

    Args:
        graph: Calls torch's operators, and holds its weights as attributes. Its code is made again.
    """
    if find_parallel() is None:
        return
    for index, node in enumerate(graph.graph.find_nodes(op="call_function", target=_linear)):
        _, weight, bias, activation, *_ = node.args
        packed = _attribute(graph, weight)
        kernel = _kernel_of(packed.dtype)
        if kernel is None or activation != "none" or not can_read(packed):
            continue
        layer = SmallBatchLinear(kernel, packed, bias and _attribute(graph, bias))
        _call_module(graph, node, f"small_batch_linear_{index}", layer)
    target = torch.ops.raystream.quantized_linear.default
    for index, node in enumerate(graph.graph.find_nodes(op="call_function", target=target)):
        _, *held, weight_bits = node.args
        integers, scales, bias = (_attribute(graph, each) for each in held)
        layer = _on_integers(integers, scales, bias, weight_bits)
        _call_module(graph, node, f"quantized_linear_{index}", layer)
    graph.graph.eliminate_dead_code()
    graph.recompile()


@cache
def _kernel_of(dtype: torch.dtype) -> SmallBatchKernel | None:
    """Return the kernel for float32 or bfloat16; log once if this processor has none."""
    is_bfloat16 = dtype is torch.bfloat16
    kernel = make_kernel(is_bfloat16=is_bfloat16)
    if kernel is None:
        needed = "AVX512_BF16 and no AMX" if is_bfloat16 else "AVX2"
        logger.warning(
            "linear layers of %s keep oneDNN's kernel, and decode steps run call by call, which is "
            "slower: ours needs a processor with %s",
            dtype,
            needed,
        )
    return kernel


def _call_module(
    graph: torch.fx.GraphModule, node: torch.fx.Node, name: str, layer: SmallBatchLinear
) -> None:
    """Make a node call a layer on its first input."""
    graph.add_submodule(name, layer)
    node.op, node.target, node.args = "call_module", name, node.args[:1]


@torch.library.custom_op("raystream::quantized_linear", mutates_args=())
def quantized_linear(
    rows: torch.Tensor,
    integers: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor,
    weight_bits: int,
) -> torch.Tensor:
    """Apply a quantized layer to [..., in_features]; see `QuantizedLinear`.

    Args:
        rows: float32 or bfloat16.
        integers: The packed weights.
        scales: [blocks, groups, columns of a block], of the rows' type.
        bias: [out_features], float32.
        weight_bits: Bits of a weight.

    Raises:
        ValueError: The rows have another width or type than the layer.
    """
    num_inputs = scales.shape[1] * SCALED_INPUTS
    if rows.shape[-1] != num_inputs or rows.dtype is not scales.dtype:
        raise ValueError(
            f"rows of {rows.shape[-1]} {rows.dtype} were given to a layer of {num_inputs} "
            f"{scales.dtype}"
        )
    output: torch.Tensor = _on_integers(integers, scales, bias, weight_bits)(rows)
    return output


@quantized_linear.register_fake
def _(
    rows: torch.Tensor,
    integers: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor,
    weight_bits: int,
) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], len(bias))


def _on_integers(
    integers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, weight_bits: int
) -> SmallBatchLinear:
    kernel = make_quantized_kernel(scales.dtype, weight_bits)
    assert kernel is not None, "the layer was made on this machine"
    return SmallBatchLinear(kernel, integers, bias, scales)


def _attribute(graph: torch.fx.GraphModule, node: object) -> torch.Tensor:
    assert isinstance(node, torch.fx.Node)
    assert isinstance(node.target, str)
    found = getattr(graph, node.target)
    assert isinstance(found, torch.Tensor)
    return found
