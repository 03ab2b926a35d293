"""The kernels of `ops`: small chains of torch's operators in one pass, emitted with llvmlite.

Their results equal torch's to the last bit, but for GELU's in float32: each value is rounded where
torch stores it, squares are added in the order of torch's vectors, and the exponential is Sleef's.
So no operation may be reordered or contracted, and bfloat16 is not rounded by AVX512_BF16.

A kernel takes one array of 64-bit integers: the values of `HEADER`, then those of its own `names`.
They are addresses, numbers of elements, strides in elements, and bits of float64. The elements of a
row are contiguous. They are computed in vectors, whose number of lanes changes no result.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from llvmlite import ir

from deployments.compute.cpu.jit.machine_code import MachineCode
from deployments.compute.cpu.jit.vector_builder import (
    F32,
    I16,
    I32,
    I64,
    POINTER,
    Value,
    VectorBuilder,
)

HEADER = ("ticket", "num_rows", "unit_rows")
"""A ticket counter, all rows, and the rows of a unit, which a thread takes with a ticket."""

NAME = "run"
"""The name of a kernel's function."""

PARTS = (16, 4, 1)
"""Lanes of the vectors that compute a row's elements: the first as long as they last, and so on."""

LANES = 8
"""Elements of the vectors that torch adds: those of AVX2, even on AVX-512. On other processors sums
may differ in their last bit."""

GROUP = 4 * LANES
"""Elements for which torch keeps separate sums."""

CASCADE, LEVELS = 16, 3
"""Groups that torch adds up before it carries their sum to the next level, and its levels.
Source: ATen/native/cpu/SumKernel.cpp, `multi_row_sum`."""

MAX_WIDTH = 65536
"""Rows must be shorter than this: torch adds longer ones in more than `LEVELS`."""

GELU_SLOPE, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715

# Source: sleefsimdsp.c, `xexpf`.
R_LN2 = 1.442695040888963407
MINUS_LN2 = (-0.693145751953125, -1.428606765330187e-06)
EXP = (
    0.000198527617612853646278381,
    0.00139304355252534151077271,
    0.00833336077630519866943359,
    0.0416664853692054748535156,
    0.166666671633720397949219,
    0.5,
)

Arguments = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class RowKernel:
    """A kernel that computes rows, each by itself.

    Attributes:
        names: What stands behind `HEADER` in the array of arguments.
        emit: Emits the work on a row from a builder, the arguments by name, the row's number and
            the kernel's own options.
    """

    names: tuple[str, ...]
    emit: Callable[..., None]

    def address(self, *options: bool | int, is_bfloat16: bool) -> int:
        """Return the address of the function for a parallel region; the first call compiles it.

        Args:
            *options: The kernel's own.
            is_bfloat16: Whether elements are bfloat16; otherwise they are float32.
        """
        return _compiled(self, is_bfloat16, options)


@cache
def _compiled(kernel: RowKernel, is_bfloat16: bool, options: tuple[bool | int, ...]) -> int:
    v = VectorBuilder(NAME, PARTS[0], is_bfloat16, has_avx512_bf16=False)
    b, names = v.builder, (*HEADER, *kernel.names)
    call = {name: v.load(I64, v.argument, 8 * i) for i, name in enumerate(names) if i}
    num_rows, unit_rows = call["num_rows"], call["unit_rows"]
    num_units = b.udiv(b.add(num_rows, b.sub(unit_rows, I64(1))), unit_rows)
    with v.units(v.argument, num_units) as unit:
        first = b.mul(unit, unit_rows)
        with v.loop(v.minimum(unit_rows, b.sub(num_rows, first)), 1) as number:
            kernel.emit(v, call, b.add(first, number), *options)
    b.ret_void()
    return MachineCode(str(v.module), optimize=True).address_of(NAME)


def _place(v: VectorBuilder, address: Value, *offsets: Value) -> Value:
    """Emit an address plus offsets, which are counted in elements."""
    place = v.builder.inttoptr(address, POINTER)
    for offset in offsets:
        place = v.offset(place, v.builder.mul(offset, I64(v.itemsize)))
    return place


def _each_part(
    v: VectorBuilder, width: Value, emit: Callable[[VectorBuilder, Value], None]
) -> None:
    """Emit the work on a row's elements; `emit` gets a builder and the offset of a vector."""
    start: Value = I64(0)
    for lanes in PARTS:
        part, stop = v.with_lanes(lanes), v.builder.and_(width, I64(-lanes))
        with part.span(start, stop, lanes) as index:
            emit(part, v.builder.mul(index, I64(v.itemsize)))
        start = stop


def _rms_norm(v: VectorBuilder, call: Arguments, row: Value, is_shifted: bool) -> None:
    b = v.builder
    outer, inner = b.udiv(row, call["num_inner"]), b.urem(row, call["num_inner"])
    source, target = (
        _place(
            v,
            call[name],
            b.mul(outer, call[f"{prefix}outer_stride"]),
            b.mul(inner, call[f"{prefix}inner_stride"]),
        )
        for name, prefix in (("rows", ""), ("output", "output_"))
    )
    _normalize(v, call, source, target, is_shifted)


RMS_NORM = RowKernel(
    (
        *("rows", "weight", "output", "num_inner", "width", "epsilon"),
        *("outer_stride", "inner_stride", "output_outer_stride", "output_inner_stride"),
    ),
    _rms_norm,
)
"""Normalises rows. `num_inner` is the number of inner rows in an outer one; `num_rows` counts those
of all; epsilon is added to the mean of the squares. The option says whether rows are multiplied by
1 + weight in float32, as in Gemma; otherwise they are rounded first, then multiplied by the weight.
"""


def _add_rms_norm(v: VectorBuilder, call: Arguments, row: Value, is_shifted: bool) -> None:
    start = v.builder.mul(row, call["width"])
    one, other, total, target = (
        _place(v, call[name], start) for name in ("rows", "others", "total", "output")
    )

    def add(part: VectorBuilder, at: Value) -> None:
        added = part.builder.fadd(part.load_wide(one, at), part.load_wide(other, at))
        part.store(part.narrow(added), total, at)

    _each_part(v, call["width"], add)
    _normalize(v, call, total, target, is_shifted)


ADD_RMS_NORM = RowKernel(
    ("rows", "others", "weight", "total", "output", "width", "epsilon"), _add_rms_norm
)
"""Adds rows and normalises the sums, as `RMS_NORM`. All rows are contiguous."""


def _rotate(v: VectorBuilder, call: Arguments, row: Value) -> None:
    b, width = v.builder, call["width"]
    half = b.udiv(width, I64(2))
    tables = [
        _place(v, call[name], b.mul(row, width), *more)
        for name in ("cosines", "sines")
        for more in ((), (half,))
    ]
    with v.loop(call["num_heads"], 1) as head:
        sources, targets = (
            [
                _place(
                    v,
                    call[name],
                    b.mul(head, call[f"{prefix}head_stride"]),
                    b.mul(row, call[f"{prefix}row_stride"]),
                    *more,
                )
                for more in ((), (half,))
            ]
            for name, prefix in (("rows", ""), ("output", "output_"))
        )

        def turn(part: VectorBuilder, at: Value) -> None:
            low, high = (part.load_wide(source, at) for source in sources)
            cosines, sines = ([part.load_wide(t, at) for t in tables[i : i + 2]] for i in (0, 2))
            for i, (x, y) in enumerate(((low, b.fneg(high)), (high, low))):
                one = part.rounded(b.fmul(x, cosines[i]))
                other = part.rounded(b.fmul(y, sines[i]))
                part.store(part.narrow(b.fadd(one, other)), targets[i], at)

        _each_part(v, half, turn)


ROTATE = RowKernel(
    (
        *("rows", "cosines", "sines", "output", "num_heads", "width"),
        *("head_stride", "row_stride", "output_head_stride", "output_row_stride"),
    ),
    _rotate,
)
"""Applies rotary positions to heads. `width` is the elements of a head. Cosines and sines are
contiguous, [rows, width]."""


def _halves(v: VectorBuilder, call: Arguments, row: Value) -> tuple[Value, Value, Value]:
    """Emit the addresses of a row's gate and factor, and of its output."""
    b, width = v.builder, call["width"]
    gate = _place(v, call["joined"], b.mul(row, b.mul(width, I64(2))))
    factor = v.offset(gate, b.mul(width, I64(v.itemsize)))
    return gate, factor, _place(v, call["output"], b.mul(row, width))


def _silu_mul(v: VectorBuilder, call: Arguments, row: Value, vector_bytes: int) -> None:
    b, width = v.builder, call["width"]
    gate, factor, target = _halves(v, call, row)
    whole = b.and_(width, I64(-(2 * vector_bytes // v.itemsize)))
    for lanes, start, stop in ((PARTS[0], I64(0), whole), (1, whole, width)):
        part = v.with_lanes(lanes)
        with part.span(start, stop, lanes) as index:
            at = b.mul(index, I64(v.itemsize))
            x = part.load_wide(gate, at)
            if lanes > 1:
                divisor = _one_plus_exp(part, b.fneg(x))
            else:
                power = part.intrinsic("llvm.exp", part.floats, b.fneg(x))
                divisor = b.fadd(part.constant(1), power)
            silu = part.rounded(b.fdiv(x, divisor))
            part.store(part.narrow(b.fmul(silu, part.load_wide(factor, at))), target, at)


SILU_MUL = RowKernel(("joined", "output", "width"), _silu_mul)
"""Multiplies SiLU of the rows' first halves by their second halves. `width` is the elements of a
half. All rows are contiguous. The option is the size of the vectors on which torch computes SiLU,
two at a time: it computes the rest of a row one by one, with the C library's exponential."""


def _gelu_mul(v: VectorBuilder, call: Arguments, row: Value) -> None:
    b = v.builder
    gate, factor, target = _halves(v, call, row)

    def multiply(part: VectorBuilder, at: Value) -> None:
        x = part.load_wide(gate, at)
        cube = b.fmul(b.fmul(b.fmul(part.constant(GELU_CUBE), x), x), x)
        y = b.fmul(part.constant(GELU_SLOPE), b.fadd(x, cube))
        gelu = b.fdiv(x, _one_plus_exp(part, b.fmul(part.constant(-2), y)))
        part.store(b.fmul(gelu, part.load_wide(factor, at)), target, at)

    _each_part(v, call["width"], multiply)


GELU_MUL = RowKernel(SILU_MUL.names, _gelu_mul)
"""As `SILU_MUL` with the GELU that has a hyperbolic tangent, in float32 only, and without options.
GELU is computed as x / (1 + exp(-2 y)), which is x (1 + tanh(y)) / 2 without cancellation: where y
is far below zero, torch's is less exact."""


def _table_mul(v: VectorBuilder, call: Arguments, row: Value) -> None:
    b, table = v.builder, _place(v, call["table"])
    gate, factor, target = _halves(v, call, row)

    def multiply(part: VectorBuilder, at: Value) -> None:
        kind = ir.VectorType(I16, part.lanes)
        bits, found = part.load(kind, gate, at), ir.Constant(kind, ir.Undefined)
        for lane in range(part.lanes):
            index = b.zext(b.extract_element(bits, I32(lane)), I64)
            value = part.load(I16, table, b.mul(index, I64(v.itemsize)))
            found = b.insert_element(found, value, I32(lane))
        product = b.fmul(part.widen_halves(found), part.load_wide(factor, at))
        part.store(part.narrow(product), target, at)

    _each_part(v, call["width"], multiply)


TABLE_MUL = RowKernel(("table", *SILU_MUL.names), _table_mul)
"""As `SILU_MUL` with any activation of bfloat16, from a table of its 65,536 values, and without
options."""


def _normalize(
    v: VectorBuilder, call: Arguments, source: Value, target: Value, is_shifted: bool
) -> None:
    """Emit a row divided by the root of the mean of its squares, times the weight."""
    b, width, weight = v.builder, call["width"], _place(v, call["weight"])
    mean = b.fdiv(_sum_of_squares(v, source, width), b.sitofp(width, F32))
    root = v.intrinsic("llvm.sqrt", F32, b.fadd(mean, v.real(call["epsilon"])))
    factor = b.fdiv(F32(1), root)

    def scale(part: VectorBuilder, at: Value) -> None:
        value = b.fmul(part.load_wide(source, at), part.splat(factor))
        by = part.load_wide(weight, at)
        if is_shifted:
            scaled = b.fmul(value, b.fadd(by, part.constant(1)))
        else:
            scaled = b.fmul(by, part.rounded(value))
        part.store(part.narrow(scaled), target, at)

    _each_part(v, width, scale)


def _sum_of_squares(v: VectorBuilder, source: Value, width: Value) -> Value:
    """Emit a row's sum of squares in torch's order: four vectors in parallel, in a cascade."""
    b = v.builder
    group, vector, one = (v.with_lanes(lanes) for lanes in (GROUP, LANES, 1))

    def square(part: VectorBuilder, index: Value) -> Value:
        x = part.load_wide(source, b.mul(index, I64(v.itemsize)))
        return b.fmul(x, x)

    def cascade(first: Value, num_groups: Value, level: int) -> tuple[Value, Value]:
        """Emit the sum of groups, and the index of the element after them."""
        size = I64(CASCADE**level)
        num_parts = b.udiv(b.add(num_groups, b.sub(size, I64(1))), size)
        with v.fold(num_parts, [group.constant(0), first, num_groups]) as carried:
            total, index, left = carried.values
            if level:
                added, after = cascade(index, v.minimum(left, size), level - 1)
            else:
                added, after = square(group, index), b.add(index, I64(GROUP))
            carried.values = [b.fadd(total, added), after, b.sub(left, size)]
        return carried.values[0], carried.values[1]

    sums, place, total = (each.variable(each.floats) for each in (group, vector, one))
    group.store(group.constant(0), sums, 0)
    num_groups = b.udiv(width, I64(GROUP))
    with b.if_then(b.icmp_signed(">", num_groups, I64(0))):
        group.store(cascade(I64(0), num_groups, LEVELS - 1)[0], sums, 0)
    first, *others = (
        b.shuffle_vector(
            group.read(sums),
            ir.Constant(group.floats, ir.Undefined),
            ir.Constant(vector.words, [*range(start, start + LANES)]),
        )
        for start in range(0, GROUP, LANES)
    )
    vector.store(first, place, 0)
    one.store(one.constant(0), total, 0)
    whole = b.and_(width, I64(-LANES))
    for part, sum_at, start, stop in (
        (vector, place, b.mul(num_groups, I64(GROUP)), whole),
        (one, total, whole, width),
    ):
        with part.span(start, stop, part.lanes) as index:
            part.store(b.fadd(part.read(sum_at), square(part, index)), sum_at, 0)
    joined = vector.read(place)
    for other in others:
        joined = b.fadd(joined, other)
    found = b.extract_element(one.read(total), I32(0))
    for lane in range(LANES):
        found = b.fadd(found, b.extract_element(joined, I32(lane)))
    return found


def _one_plus_exp(v: VectorBuilder, x: Value) -> Value:
    """Emit 1 + exp(x) with Sleef's exponential, clamping x where the sum no longer changes."""
    b = v.builder
    for order, bound in (("<", v.constant(-87)), (">", v.constant(89))):
        x = b.select(b.fcmp_ordered(order, x, bound), bound, x)  # NaN stays NaN
    whole = v.intrinsic("llvm.rint", v.floats, b.fmul(x, v.constant(R_LN2)))
    s, power = x, v.constant(EXP[0])
    for part in MINUS_LN2:
        s = v.fma(whole, v.constant(part), s)
    for coefficient in EXP[1:]:
        power = v.fma(power, s, v.constant(coefficient))
    power = b.fadd(v.constant(1), v.fma(b.fmul(s, s), power, s))
    # Multiply by two factors, since 2 ** 128 is not a float32.
    exponent = b.add(b.fptosi(whole, v.words), v.constant(126, v.words))
    half = b.bitcast(b.shl(exponent, v.constant(23, v.words)), v.floats)
    return b.fadd(v.constant(1), b.fmul(b.fmul(power, v.constant(2)), half))
