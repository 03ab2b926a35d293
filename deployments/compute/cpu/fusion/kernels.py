"""The kernels of `ops`, compiled by numba: small chains of torch's operators in one pass.

Their results equal torch's to the last bit, but for GELU's in float32: each value is rounded where
torch stores it, squares are added in the order of torch's vectors, and the exponential is Sleef's.
So no operation may be reordered or contracted, and nothing is compiled with fast math.

Each kernel is the address of a function for a parallel region. Its argument is an array of 64-bit
integers, whose names stand above the kernel: addresses, numbers of elements, and strides, counted
in elements. It begins with what divides the rows among the threads: a ticket counter, all rows, and
the rows of a unit, which a thread takes with a ticket. The elements of a row are contiguous.
"""

import math
from functools import cache

import numba
import numpy as np

from deployments.compute.cpu.jit.numba_kernels import (
    as_float32,
    cast_like,
    compile_kernel,
    fused_multiply_add,
    pointer_to,
    power_of_two,
    take_ticket,
)

LANES = 8
"""Elements of the vectors that torch adds: those of AVX2, even on AVX-512. On other processors sums
may differ in their last bit."""

GROUP = 4 * LANES
"""Elements for which torch keeps separate sums."""

CASCADE = 16
"""Groups that torch adds up before it carries their sum to the next level.
Source: ATen/native/cpu/SumKernel.cpp, `multi_row_sum`."""

MAX_WIDTH = 65536
"""Rows must be shorter than this: torch adds longer ones in more levels than `_sum_of_squares`."""

GELU_SLOPE, GELU_CUBE = np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715)

# Source: sleefsimdsp.c, `xexpf`.
R_LN2 = np.float32(1.442695040888963407)
MINUS_LN2_UPPER, MINUS_LN2_LOWER = (
    np.float32(-0.693145751953125),
    np.float32(-1.428606765330187e-06),
)
E1, E2, E3, E4, E5 = (
    np.float32(c)
    for c in (
        0.000198527617612853646278381,
        0.00139304355252534151077271,
        0.00833336077630519866943359,
        0.0416664853692054748535156,
        0.166666671633720397949219,
    )
)


def _arguments(*names: str) -> np.dtype[np.void]:
    """Return the layout of a kernel's arguments: a ticket counter, two counts, and the names."""
    return np.dtype([(name, np.int64) for name in ("ticket", "num_rows", "unit_rows", *names)])


RMS_NORM = _arguments(
    *("rows", "weight", "output", "num_inner", "width"),
    *("outer_stride", "inner_stride", "output_outer_stride", "output_inner_stride"),
)
"""`num_inner` is the number of inner rows in an outer one; `num_rows` counts those of all."""


@cache
def make_rms_norm(is_bfloat16: bool, is_shifted: bool, epsilon: float) -> int:
    """Return a kernel that normalises rows; its arguments are those of `RMS_NORM`.

    Args:
        is_bfloat16: Whether elements are bfloat16; otherwise they are float32.
        is_shifted: Whether rows are multiplied by 1 + weight in float32, as in Gemma; otherwise
            they are rounded first and multiplied by the weight.
        epsilon: Added to the mean of the squares.
    """
    stored, itemsize = _storage(is_bfloat16)

    def rms_norm(arguments):
        call = numba.carray(pointer_to(arguments), 1, RMS_NORM)[0]
        rows, weight, output = call.rows, call.weight, call.output
        num_rows, num_inner, width = call.num_rows, call.num_inner, call.width
        unit_rows = call.unit_rows
        outer_stride, output_outer = call.outer_stride, call.output_outer_stride
        inner_stride, output_inner = call.inner_stride, call.output_inner_stride
        values, sums = np.empty(width, np.float32), np.empty((3, GROUP), np.float32)
        factors = numba.carray(pointer_to(weight), width, stored)
        row = _next_row(-1, arguments, unit_rows)
        while row < num_rows:
            i, j = row // num_inner, row % num_inner
            at = rows + itemsize * (i * outer_stride + j * inner_stride)
            source = numba.carray(pointer_to(at), width, stored)
            at = output + itemsize * (i * output_outer + j * output_inner)
            target = numba.carray(pointer_to(at), width, stored)
            for k in range(width):
                values[k] = as_float32(source[k])
            factor = _inverse_rms(_sum_of_squares(values, width, sums), width, epsilon)
            _scale(values, factor, factors, target, width, is_shifted)
            row = _next_row(row, arguments, unit_rows)

    return compile_kernel(rms_norm)


ADD_RMS_NORM = _arguments("rows", "others", "weight", "total", "output", "width")
"""All rows are contiguous."""


@cache
def make_add_rms_norm(is_bfloat16: bool, is_shifted: bool, epsilon: float) -> int:
    """Return a kernel that adds rows and normalises the sums; see `make_rms_norm`.

    Its arguments are those of `ADD_RMS_NORM`.
    """
    stored, itemsize = _storage(is_bfloat16)

    def add_rms_norm(arguments):
        call = numba.carray(pointer_to(arguments), 1, ADD_RMS_NORM)[0]
        rows, others, weight = call.rows, call.others, call.weight
        total, output = call.total, call.output
        num_rows, unit_rows, width = call.num_rows, call.unit_rows, call.width
        values, sums = np.empty(width, np.float32), np.empty((3, GROUP), np.float32)
        factors = numba.carray(pointer_to(weight), width, stored)
        row = _next_row(-1, arguments, unit_rows)
        while row < num_rows:
            at = itemsize * row * width
            first = numba.carray(pointer_to(rows + at), width, stored)
            second = numba.carray(pointer_to(others + at), width, stored)
            added = numba.carray(pointer_to(total + at), width, stored)
            target = numba.carray(pointer_to(output + at), width, stored)
            for k in range(width):
                added[k] = cast_like(added[k], as_float32(first[k]) + as_float32(second[k]))
            for k in range(width):
                values[k] = as_float32(added[k])
            factor = _inverse_rms(_sum_of_squares(values, width, sums), width, epsilon)
            _scale(values, factor, factors, target, width, is_shifted)
            row = _next_row(row, arguments, unit_rows)

    return compile_kernel(add_rms_norm)


ROTATE = _arguments(
    *("rows", "cosines", "sines", "output", "num_heads", "width"),
    *("head_stride", "row_stride", "output_head_stride", "output_row_stride"),
)
"""`width` is the elements of a head. Cosines and sines are contiguous, [rows, width]."""


@cache
def make_rotate(is_bfloat16: bool) -> int:
    """Return a kernel that applies rotary positions to heads; see `ROTATE` for its arguments."""
    stored, itemsize = _storage(is_bfloat16)

    def rotate(arguments):
        call = numba.carray(pointer_to(arguments), 1, ROTATE)[0]
        rows, cosines, sines, output = call.rows, call.cosines, call.sines, call.output
        num_rows, num_heads, width = call.num_rows, call.num_heads, call.width
        head_stride, output_head = call.head_stride, call.output_head_stride
        row_stride, output_row = call.row_stride, call.output_row_stride
        half, unit_rows = width // 2, call.unit_rows
        row = _next_row(-1, arguments, unit_rows)
        while row < num_rows:
            cos = numba.carray(pointer_to(cosines + itemsize * row * width), width, stored)
            sin = numba.carray(pointer_to(sines + itemsize * row * width), width, stored)
            for head in range(num_heads):
                at = rows + itemsize * (head * head_stride + row * row_stride)
                source = numba.carray(pointer_to(at), width, stored)
                at = output + itemsize * (head * output_head + row * output_row)
                target = numba.carray(pointer_to(at), width, stored)
                for k in range(half):
                    low, high = as_float32(source[k]), as_float32(source[half + k])
                    target[k] = _rotated(low, cos[k], -high, sin[k])
                    target[half + k] = _rotated(high, cos[half + k], low, sin[half + k])
            row = _next_row(row, arguments, unit_rows)

    return compile_kernel(rotate)


HALVES = _arguments("joined", "output", "width")
"""`width` is the elements of a half. All rows are contiguous."""


@cache
def make_silu_mul(is_bfloat16: bool, vector_bytes: int) -> int:
    """Return a kernel that multiplies SiLU of the rows' first halves by their second halves.

    Its arguments are those of `HALVES`.

    Args:
        is_bfloat16: Whether elements are bfloat16; otherwise they are float32.
        vector_bytes: Size of the vectors on which torch computes SiLU, two at a time. It computes
            the remaining elements of a row one by one, with the C library's exponential.
    """
    stored, itemsize = _storage(is_bfloat16)
    unit = 2 * vector_bytes // itemsize

    def silu_mul(arguments):
        call = numba.carray(pointer_to(arguments), 1, HALVES)[0]
        joined, output, width = call.joined, call.output, call.width
        num_rows, unit_rows = call.num_rows, call.unit_rows
        row = _next_row(-1, arguments, unit_rows)
        while row < num_rows:
            at = joined + 2 * itemsize * row * width
            gate = numba.carray(pointer_to(at), width, stored)
            up = numba.carray(pointer_to(at + itemsize * width), width, stored)
            target = numba.carray(pointer_to(output + itemsize * row * width), width, stored)
            for k in range(width - width % unit):
                x = as_float32(gate[k])
                silu = cast_like(gate[k], x / _one_plus_exp(-x))
                target[k] = cast_like(gate[k], as_float32(silu) * as_float32(up[k]))
            for k in range(width - width % unit, width):
                x = as_float32(gate[k])
                silu = cast_like(gate[k], x / (np.float32(1) + math.exp(-x)))
                target[k] = cast_like(gate[k], as_float32(silu) * as_float32(up[k]))
            row = _next_row(row, arguments, unit_rows)

    return compile_kernel(silu_mul)


@cache
def make_gelu_mul() -> int:
    """Return a kernel that multiplies GELU of the rows' first halves by their second halves.

    GELU is the one with a hyperbolic tangent, and elements are float32. The kernel's arguments are
    those of `HALVES`. GELU is computed as x / (1 + exp(-2 y)), which is x (1 + tanh(y)) / 2 without
    cancellation: where y is far below zero, torch's is less exact.
    """

    def gelu_mul(arguments):
        call = numba.carray(pointer_to(arguments), 1, HALVES)[0]
        joined, output, width = call.joined, call.output, call.width
        num_rows, unit_rows = call.num_rows, call.unit_rows
        row = _next_row(-1, arguments, unit_rows)
        while row < num_rows:
            at = joined + 8 * row * width
            gate = numba.carray(pointer_to(at), width, np.float32)
            up = numba.carray(pointer_to(at + 4 * width), width, np.float32)
            target = numba.carray(pointer_to(output + 4 * row * width), width, np.float32)
            for k in range(width):
                x = gate[k]
                y = GELU_SLOPE * (x + GELU_CUBE * x * x * x)
                target[k] = x / _one_plus_exp(np.float32(-2) * y) * up[k]
            row = _next_row(row, arguments, unit_rows)

    return compile_kernel(gelu_mul)


TABLE_HALVES = _arguments("table", "joined", "output", "width")
"""As `HALVES`, with the table before them."""


@cache
def make_table_mul() -> int:
    """Return a kernel for any activation of bfloat16, from a table of its 65,536 values.

    Its arguments are those of `TABLE_HALVES`; see `make_silu_mul`.
    """

    def table_mul(arguments):
        call = numba.carray(pointer_to(arguments), 1, TABLE_HALVES)[0]
        joined, output, width = call.joined, call.output, call.width
        num_rows, unit_rows = call.num_rows, call.unit_rows
        activated = numba.carray(pointer_to(call.table), 65536, np.uint16)
        row = _next_row(-1, arguments, unit_rows)
        while row < num_rows:
            at = joined + 4 * row * width
            gate = numba.carray(pointer_to(at), width, np.uint16)
            up = numba.carray(pointer_to(at + 2 * width), width, np.uint16)
            target = numba.carray(pointer_to(output + 2 * row * width), width, np.uint16)
            for k in range(width):
                product = as_float32(activated[gate[k]]) * as_float32(up[k])
                target[k] = cast_like(gate[k], product)
            row = _next_row(row, arguments, unit_rows)

    return compile_kernel(table_mul)


def _storage(is_bfloat16: bool) -> tuple[type[np.generic], int]:
    return (np.uint16, 2) if is_bfloat16 else (np.float32, 4)


@numba.njit(inline="always", error_model="numpy")
def _next_row(row, arguments, unit_rows):
    """Return the row after `row` in its unit, or the first one of another unit; -1 has no unit."""
    following = row + 1
    return following if following % unit_rows else unit_rows * take_ticket(arguments)


@numba.njit(inline="always", error_model="numpy")
def _sum_of_squares(values, width, sums):
    """Add squares in torch's order: four vectors in parallel, a carry after each 16 groups."""
    num_vectors = width // LANES
    num_groups = num_vectors // 4
    sums[:] = 0
    for i in range(num_groups):
        _add_squares(values, i * GROUP, GROUP, sums)
        if (i + 1) % CASCADE == 0:
            _carry(sums, 0)
        if (i + 1) % (CASCADE * CASCADE) == 0:
            _carry(sums, 1)
    for k in range(GROUP):
        sums[0, k] = sums[0, k] + sums[1, k] + sums[2, k]
    for i in range(4 * num_groups, num_vectors):
        _add_squares(values, i * LANES, LANES, sums)
    total = np.float32(0)
    for i in range(num_vectors * LANES, width):
        total += values[i] * values[i]
    for k in range(LANES):
        total += sums[0, k] + sums[0, LANES + k] + sums[0, 2 * LANES + k] + sums[0, 3 * LANES + k]
    return total


@numba.njit(inline="always", error_model="numpy")
def _add_squares(values, start, count, sums):
    for k in range(count):
        sums[0, k] += values[start + k] * values[start + k]


@numba.njit(inline="always", error_model="numpy")
def _carry(sums, level):
    for k in range(GROUP):
        sums[level + 1, k] += sums[level, k]
        sums[level, k] = 0


@numba.njit(inline="always", error_model="numpy")
def _inverse_rms(total, width, epsilon):
    mean = total / np.float32(width)
    return np.float32(1) / np.sqrt(mean + np.float32(epsilon))


@numba.njit(inline="always", error_model="numpy")
def _scale(values, factor, weight, target, width, is_shifted):
    for k in range(width):
        value = values[k] * factor
        if is_shifted:
            target[k] = cast_like(target[k], value * (as_float32(weight[k]) + np.float32(1)))
        else:
            rounded = as_float32(cast_like(target[k], value))
            target[k] = cast_like(target[k], as_float32(weight[k]) * rounded)


@numba.njit(inline="always", error_model="numpy")
def _rotated(x, cos, y, sin):
    first = as_float32(cast_like(cos, x * as_float32(cos)))
    second = as_float32(cast_like(cos, y * as_float32(sin)))
    return cast_like(cos, first + second)


@numba.njit(inline="always", error_model="numpy")
def _one_plus_exp(x):
    """Return 1 + exp(x) with Sleef's exponential, clamping x where the sum no longer changes."""
    x = np.float32(-87) if x < np.float32(-87) else x
    x = np.float32(89) if x > np.float32(89) else x
    whole = np.rint(x * R_LN2)
    s = fused_multiply_add(whole, MINUS_LN2_UPPER, x)
    s = fused_multiply_add(whole, MINUS_LN2_LOWER, s)
    u = fused_multiply_add(E1, s, E2)
    u = fused_multiply_add(u, s, E3)
    u = fused_multiply_add(u, s, E4)
    u = fused_multiply_add(u, s, E5)
    u = fused_multiply_add(u, s, np.float32(0.5))
    u = np.float32(1) + fused_multiply_add(s * s, u, s)
    # Multiply by two factors, since 2 ** 128 is not a float32.
    return np.float32(1) + u * np.float32(2) * power_of_two(np.int32(whole) - np.int32(1))
