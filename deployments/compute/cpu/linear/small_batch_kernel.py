"""The kernel of `small_batch_linear`, emitted with llvmlite's builder.

The product of a small batch with a large matrix is bound by memory at one row and by arithmetic at
a hundred. In between, a core waits for memory and computes in turn, unless it prefetches: each tile
fetches a part of the next weights into the L2 cache while it computes. With more rows the kernel is
as fast as oneDNN's, and is used because a row's result is the same in any batch.

The weights are in oneDNN's layout: [blocks of 64 columns, words of inputs, 64, inputs of a word]. A
word has 32 bits: one float32, or two bfloat16. A tile computes some rows of a strip, which is as
many columns of a block as two vectors hold; its sums stay in registers. A layer with many inputs is
computed in parts, so that the weights of a part stay in the L2 cache; its sums wait in memory, in
float32, so a part more or less changes no bit. Threads take units one by one from a ticket counter,
so a thread that has lost its core to another process does not delay the rest.

The tile of a few rows is wide: it computes all columns of a block, so it reads the weights once and
in order, and fetches what it needs next. Memory is the only limit then.

Quantized weights are small integers. The first tile of a strip unpacks those of a part, and stores
their elements for the other tiles: most of its instructions run beside the products, on other ports
of the core. Integers of up to 8 bits are exact in bfloat16. A tile adds the products of a group of
inputs by themselves, and multiplies their sum by the group's scale; its totals wait on the stack
meanwhile. A wide tile is the only one, so that no element goes through memory.

Source: https://llvm.org/docs/LangRef.html
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice, product

import torch
from llvmlite import ir

from deployments.compute.cpu.jit.machine_code import MachineCode
from deployments.compute.cpu.jit.vector_builder import (
    I32,
    I64,
    POINTER,
    Value,
    VectorBuilder,
)
from deployments.compute.cpu.linear.packed_layout import BLOCK
from deployments.compute.cpu.linear.tiling import (
    CACHE_LINE,
    GROUP_ROWS,
    MAX_GROUP_ROWS,
    UNPACKED_BYTES,
    UNROLLED,
    WORD_BYTES,
    Arithmetic,
    Tiling,
    find_arithmetic,
)
from deployments.compute.cpu.linear.unpacking import unpack
from deployments.plan.model_shape import SCALED_INPUTS
from deployments.plan.processor import features, has_bfloat16

ARGUMENTS = (
    *("rows", "row_bytes", "weights", "scales", "num_turns", "part_turns", "num_parts"),
    *("output", "output_row_bytes", "bias", "num_units", "tile", "last_tile"),
    *("unpacking_tile", "last_unpacking_tile", "num_tiles", "tile_rows", "num_rows"),
    *("fetched_bytes", "num_groups", "num_strips", "ticket"),
)
"""The kernel's arguments, an array of 64-bit integers. A unit is a group of rows and a block of
columns; `num_tiles` are those of a group. `tile` is a function that leaves the sums in memory, and
`last_tile` one that writes the output; the two others also unpack quantized weights. `scales` are
those of quantized weights. The ticket counts the units taken."""

TILE_ARGUMENTS = {
    **{"rows": POINTER, "row_bytes": I64, "weights": POINTER, "num_turns": I64},
    **{"start": POINTER, "start_row_bytes": I64, "output": POINTER, "output_row_bytes": I64},
    **{"next": POINTER, "scales": POINTER, "elements": POINTER},
}
"""A tile's arguments: it adds products to the sums at `start`, and fetches what is at `next`,
unless it is wide. Only tiles of quantized weights read `scales`; the first of a strip stores what
it unpacks at `elements`, where the others find their weights."""


class SmallBatchKernel:
    """The compiled kernel.

    Attributes:
        arithmetic: What it is compiled for.
        address: The function's address, for a parallel region; its argument is an array of
            `ARGUMENTS`.
        tiles: The addresses of the tilings' functions, by their names. Any number of rows has a
            tiling among those of up to `GROUP_ROWS` rows.
    """

    def __init__(self, arithmetic: Arithmetic) -> None:
        """Compile for this machine, the first time in about 0.6 s."""
        self.arithmetic = arithmetic
        self._code = MachineCode.emitted(emit_kernel, arithmetic, optimize=False)
        self.address = self._code.address_of("multiply")
        names = (
            tiling.name(is_last=is_last, unpacks=unpacks)
            for tiling in _tilings(arithmetic)
            for is_last, unpacks in _functions(arithmetic, tiling)
        )
        self.tiles = {name: self._code.address_of(name) for name in names}


def make_kernel(*, is_bfloat16: bool) -> SmallBatchKernel | None:
    """Return the kernel for elements of a type; None if this processor has none."""
    arithmetic = find_arithmetic(features(), is_bfloat16=is_bfloat16)
    return None if arithmetic is None else _compiled(arithmetic)


def make_quantized_kernel(dtype: torch.dtype, weight_bits: int) -> SmallBatchKernel | None:
    """Return the kernel for quantized weights; None if this processor has none.

    Args:
        dtype: The rows' type; without AVX512_BF16, rows of bfloat16 are converted to float32.
        weight_bits: 4 or 8.
    """
    is_bfloat16 = dtype is torch.bfloat16 and has_bfloat16()
    # oneDNN's matrix units do not read such weights.
    others = {**features(), "amx-bf16": False}
    arithmetic = find_arithmetic(others, is_bfloat16=is_bfloat16)
    if arithmetic is None:
        return None
    has_vbmi = bool(features().get("avx512vbmi"))
    return _compiled(replace(arithmetic, weight_bits=weight_bits, has_vbmi=has_vbmi))


@cache
def _compiled(arithmetic: Arithmetic) -> SmallBatchKernel:
    return SmallBatchKernel(arithmetic)


def emit_kernel(arithmetic: Arithmetic) -> str:
    """Return the kernel's LLVM IR."""
    module = ir.Module("small_batch")
    for tiling in _tilings(arithmetic):
        for is_last, unpacks in _functions(arithmetic, tiling):
            _emit_tile(module, arithmetic, tiling, is_last=is_last, unpacks=unpacks)
    _emit_worker(module, arithmetic)
    return str(module)


def _tilings(arithmetic: Arithmetic) -> Collection[Tiling]:
    """Return a tiling for each function that rows of any number need."""
    tilings = (Tiling.of(num_rows, arithmetic) for num_rows in range(1, GROUP_ROWS + 1))
    return {(tiling.tile_rows, tiling.lines): tiling for tiling in tilings}.values()


def _functions(arithmetic: Arithmetic, tiling: Tiling) -> Collection[tuple[bool, bool]]:
    """Return, for each function of a tiling, whether it is the last one and whether it unpacks."""
    is_quantized = arithmetic.weight_bits is not None
    if tiling.is_wide:
        return ((True, is_quantized),)
    return tuple(product((False, True), (False, True) if is_quantized else (False,)))


def _emit_tile(
    module: ir.Module, arithmetic: Arithmetic, tiling: Tiling, *, is_last: bool, unpacks: bool
) -> None:
    """Emit the function of a tile: it loops over the inputs and keeps all sums in registers."""
    name = tiling.name(is_last=is_last, unpacks=unpacks)
    kinds = tuple(TILE_ARGUMENTS.values())
    v = VectorBuilder(
        *(name, arithmetic.lanes, arithmetic.is_bfloat16),
        kinds=kinds,
        module=module,
        # The arithmetic of bfloat16 is that of AVX512_BF16, whatever this processor has.
        has_avx512_bf16=arithmetic.is_bfloat16,
    )
    b = v.builder
    a = dict(zip(TILE_ARGUMENTS, v.arguments, strict=True))
    rows, vectors = range(tiling.tile_rows), _vectors(arithmetic, tiling)
    starts = [v.offset(a["start"], b.mul(a["start_row_bytes"], I64(row))) for row in rows]
    sums = [v.load(v.floats, start, at) for start in starts for at in vectors]
    fetched = v.offset(a["weights"], arithmetic.fetched_ahead) if tiling.is_wide else a["next"]
    places = [a["rows"], a["weights"], fetched]
    if unpacks and not tiling.is_wide:
        places.append(a["elements"])
    heads = 1 + len(places)
    row_at = [b.mul(a["row_bytes"], I64(row)) for row in rows]
    add_turns = partial(_emit_turns, v, arithmetic, tiling, row_at, unpacks)
    if arithmetic.weight_bits is None:
        _, sums = add_turns(a["num_turns"], places, sums)
    else:
        group_turns = I64(SCALED_INPUTS // arithmetic.turn_inputs)
        num_groups = b.udiv(a["num_turns"], group_turns)
        zeros = [v.constant(0)] * len(sums)
        with v.fold(num_groups, [a["scales"], *places, *sums]) as carried:
            scales_at, *places = carried.values[:heads]
            places, added = add_turns(group_turns, places, zeros)
            scales = [v.load_wide(scales_at, at * arithmetic.itemsize // 4) for at in vectors]
            factors = zip(added, scales * len(rows), carried.values[heads:], strict=True)
            sums = [v.fma(*each) for each in factors]
            scales_at = v.offset(scales_at, arithmetic.itemsize * BLOCK)
            carried.values = [scales_at, *places, *sums]
        sums = carried.values[heads:]
    shrink = arithmetic.word_inputs if is_last else 1
    for row in rows:
        output = v.offset(a["output"], b.mul(a["output_row_bytes"], I64(row)))
        for vector, at in enumerate(vectors):
            total = sums[row * len(vectors) + vector]
            v.store(v.narrow(total) if is_last else total, output, at // shrink)
    b.ret_void()


def _emit_turns(
    v: VectorBuilder,
    arithmetic: Arithmetic,
    tiling: Tiling,
    row_at: Sequence[Value],
    unpacks: bool,
    num_turns: Value,
    places: Sequence[Value],
    sums: Sequence[Value],
) -> tuple[list[Value], list[Value]]:
    """Emit the products of some turns.

    Args:
        v: Emits the tile.
        arithmetic: What the tile is compiled for.
        tiling: The tile.
        row_at: Where each row begins.
        unpacks: Whether the weights are packed integers.
        num_turns: How many turns.
        places: The addresses of the rows, of the weights, of what is fetched, and, if any, of where
            unpacked elements are stored.
        sums: What the products are added to, by rows and vectors.

    Returns:
        The places and the sums after it.
    """
    vectors = _vectors(arithmetic, tiling)
    word_bytes = WORD_BYTES if arithmetic.weight_bits is None else 4 * arithmetic.strip
    turn_bytes = arithmetic.turn_bytes if unpacks else word_bytes * UNROLLED
    steps = 4 * UNROLLED, turn_bytes, CACHE_LINE * tiling.lines, word_bytes * UNROLLED
    with v.fold(num_turns, [*places, *sums]) as carried:
        held, sums = carried.values[: len(places)], carried.values[len(places) :]
        rows_at, weights_at, next_at, *elements_at = held
        row_starts = [v.offset(rows_at, at) for at in row_at]
        for line in range(tiling.lines):
            v.prefetch(v.offset(next_at, line * CACHE_LINE))
        strips = [
            unpack(v, arithmetic, weights_at, strip * arithmetic.strip_turn_bytes)
            for strip in range(arithmetic.num_strips if tiling.is_wide else 1)
        ]
        for word in range(UNROLLED):
            words_at = [word * word_bytes + at for at in vectors]
            if unpacks:
                weights = [vector for strip in strips for vector in islice(strip, 2)]
            else:
                weights = [v.load(v.words, weights_at, at) for at in words_at]
            for elements, (at, vector) in product(elements_at, zip(words_at, weights, strict=True)):
                v.store(vector, elements, at)
            for row, start in enumerate(row_starts):
                inputs = v.splat(v.load(I32, start, 4 * word))
                for vector, factor in enumerate(weights):
                    index = row * len(vectors) + vector
                    sums[index] = v.add_products(sums[index], inputs, factor)
        carried.values = [*map(v.offset, held, steps), *sums]
    return carried.values[: len(places)], carried.values[len(places) :]


def _vectors(arithmetic: Arithmetic, tiling: Tiling) -> Sequence[int]:
    """Return where the vectors of a tile's columns begin, in bytes of float32."""
    columns = BLOCK if tiling.is_wide else arithmetic.strip
    return range(0, 4 * columns, 4 * arithmetic.lanes)


def _emit_worker(module: ir.Module, arithmetic: Arithmetic) -> None:
    """Emit the function that each thread runs: it takes units until none are left.

    Where groups share their last rows, two threads may write the same values to the same places.
    """
    v = VectorBuilder("multiply", arithmetic.lanes, arithmetic.is_bfloat16, module=module)
    b = v.builder
    a = {name: v.load(I64, v.argument, 8 * i) for i, name in enumerate(ARGUMENTS[:-1])}
    ticket = v.offset(v.argument, 8 * (len(ARGUMENTS) - 1))
    waiting = v.array((MAX_GROUP_ROWS + arithmetic.max_tile_rows) * BLOCK)
    unpacked = None if arithmetic.weight_bits is None else v.array(UNPACKED_BYTES // 4)
    entry, take, work, end = b.block, *(b.append_basic_block(n) for n in ("take", "work", "end"))
    first = b.atomic_rmw("add", ticket, I64(1), "monotonic")
    b.branch(take)
    b.position_at_end(take)
    unit = b.phi(I64)
    unit.add_incoming(first, entry)
    b.cbranch(b.icmp_signed("<", unit, a["num_units"]), work, end)
    b.position_at_end(work)
    after = b.atomic_rmw("add", ticket, I64(1), "monotonic")
    _emit_unit(v, arithmetic, a, waiting, unpacked, unit, v.minimum(after, a["num_units"]))
    unit.add_incoming(after, b.block)
    b.branch(take)
    b.position_at_end(end)
    b.ret_void()


def _emit_unit(
    v: VectorBuilder,
    arithmetic: Arithmetic,
    a: Mapping[str, Value],
    waiting: Value,
    unpacked: Value | None,
    unit: Value,
    after: Value,
) -> None:
    """Emit the products of a unit, while the weights of the unit `after` it are fetched.

    Args:
        v: Emits the worker.
        arithmetic: What the tiles are compiled for.
        a: The kernel's arguments, by name.
        waiting: The address of the sums of a group of rows and a block, [tiles, rows, strip].
        unpacked: The address of the elements of a part's quantized weights.
        unit: The unit's number.
        after: The number of the unit that this thread takes next.
    """
    b, strip = v.builder, arithmetic.strip

    def address(name: str, offset: Value) -> Value:
        return v.offset(b.inttoptr(a[name], POINTER), offset)

    block, group = b.udiv(unit, a["num_groups"]), b.urem(unit, a["num_groups"])
    block_bytes = b.mul(a["num_turns"], I64(arithmetic.turn_bytes))
    weights, following = (
        address("weights", b.mul(number, block_bytes))
        for number in (block, b.udiv(after, a["num_groups"]))
    )
    scale_bytes = BLOCK * arithmetic.itemsize * arithmetic.turn_inputs // SCALED_INPUTS
    scales = address("scales", b.mul(block, b.mul(a["num_turns"], I64(scale_bytes))))
    bias = address("bias", b.mul(block, I64(4 * BLOCK)))
    output = address("output", b.mul(block, I64(arithmetic.itemsize * BLOCK)))
    last_row = b.sub(a["num_rows"], a["tile_rows"])
    tile_bytes = b.mul(a["tile_rows"], I64(4 * strip))
    kind = ir.FunctionType(ir.VoidType(), tuple(TILE_ARGUMENTS.values()))
    with v.loop(a["num_parts"], 1) as part:
        turn = b.mul(part, a["part_turns"])
        num_turns = v.minimum(a["part_turns"], b.sub(a["num_turns"], turn))
        is_first = b.icmp_signed("==", part, I64(0))
        is_last = b.icmp_signed("==", b.add(part, I64(1)), a["num_parts"])
        part_weights = v.offset(weights, b.mul(turn, I64(arithmetic.turn_bytes)))
        part_bytes = b.mul(num_turns, I64(arithmetic.turn_bytes))
        part_scales = v.offset(scales, b.mul(turn, I64(scale_bytes)))
        fetched = b.select(is_last, following, v.offset(part_weights, part_bytes))
        inputs_at = b.mul(turn, I64(4 * UNROLLED))
        tile = b.select(is_last, a["last_tile"], a["tile"])
        unpacking = b.select(is_last, a["last_unpacking_tile"], a["unpacking_tile"])
        with v.loop(a["num_strips"], 1) as number:
            column = b.mul(number, I64(strip))
            strip_bytes = 4 * strip if unpacked is None else arithmetic.strip_turn_bytes
            strip_weights = v.offset(part_weights, b.mul(number, I64(strip_bytes)))
            strip_bias = v.offset(bias, b.mul(column, I64(4)))
            strip_scales = v.offset(part_scales, b.mul(column, I64(arithmetic.itemsize)))
            strip_output = v.offset(output, b.mul(column, I64(arithmetic.itemsize)))
            first_tile = b.mul(number, a["num_tiles"])
            with v.loop(a["num_tiles"], 1) as n:
                wanted = b.mul(b.add(b.mul(group, a["num_tiles"]), n), a["tile_rows"])
                row = v.minimum(wanted, last_row)
                place = b.add(first_tile, n)
                sums = v.offset(waiting, b.mul(place, tile_bytes))
                called, read = tile, strip_weights
                if unpacked is not None:
                    unpacks = b.icmp_signed("==", n, I64(0))
                    called = b.select(unpacks, unpacking, tile)
                    read = b.select(unpacks, strip_weights, unpacked)
                function = b.inttoptr(called, POINTER)
                function.type = kind.as_pointer()  # a call needs the function's type
                b.call(
                    function,
                    (
                        address("rows", b.add(b.mul(row, a["row_bytes"]), inputs_at)),
                        a["row_bytes"],
                        read,
                        num_turns,
                        b.select(is_first, strip_bias, sums),
                        b.select(is_first, I64(0), I64(4 * strip)),
                        b.select(
                            is_last, v.offset(strip_output, b.mul(row, a["output_row_bytes"])), sums
                        ),
                        b.select(is_last, a["output_row_bytes"], I64(4 * strip)),
                        v.offset(fetched, b.mul(place, a["fetched_bytes"])),
                        strip_scales,
                        POINTER(None) if unpacked is None else unpacked,
                    ),
                )
