"""What numba lacks: bfloat16, pointers from addresses, and an exponential that becomes a vector.

torch hands out addresses, and numpy has no bfloat16: its values are read as 16-bit integers, which
are the upper half of a float32.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LOG2_E = np.float32(1.4426950408889634)

# The polynomial of degree 6 that interpolates 2 ** x at Chebyshev's points of [0, 1]; its relative
# error there is below that of a float32.
C0, C1, C2, C3, C4, C5, C6 = (
    np.float32(c)
    for c in np.polynomial.Chebyshev.interpolate(np.exp2, 6, domain=[0, 1])
    .convert(kind=np.polynomial.Polynomial)
    .coef
)


@intrinsic
def pointer_to(typing_context: Any, address: Any) -> Any:
    """Return an address, an integer, as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), generate


@intrinsic
def take(typing_context: Any, address: Any) -> Any:
    """Return the 64-bit integer at an address, and add one to it, before any other thread can."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.IntType(64)(1), "monotonic")

    return types.int64(types.intp), generate


@intrinsic
def as_float32(typing_context: Any, value: Any) -> Any:
    """Return a float32 as it is, and 16-bit integers as the bfloat16 that they are."""

    def widen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, wide.type(16)), ir.FloatType())

    def keep(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[0]

    return types.float32(value), widen if value == types.uint16 else keep


@intrinsic
def like(typing_context: Any, sample: Any, value: Any) -> Any:
    """Return a float32 as what the sample is: itself, or the bits of the nearest bfloat16."""

    def narrow(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[1], ir.IntType(32))
        upper = builder.lshr(bits, bits.type(16))
        # Half of the last bit that stays, or a little less where that makes a tie even.
        half = builder.add(builder.and_(upper, bits.type(1)), bits.type(0x7FFF))
        rounded = builder.lshr(builder.add(bits, half), bits.type(16))
        return builder.trunc(rounded, ir.IntType(16))

    def keep(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[1]

    return sample(sample, types.float32), narrow if sample == types.uint16 else keep


@intrinsic
def _float32_of_bits(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def fused_multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of float32, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@numba.njit(inline="always")
def power_of_two(exponent):
    """Return 2 ** exponent as a float32, for an int32 from -126 to 127."""
    return _float32_of_bits((exponent + np.int32(127)) << np.int32(23))


@numba.njit(inline="always", fastmath=True)
def fast_exp(x):
    """Return exp(x) for x <= 0, in float32 and without a call, so that loops become vectors."""
    exponent = max(np.float32(x) * LOG2_E, np.float32(-126))
    whole = np.floor(exponent)
    f = exponent - whole
    power = C0 + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * (C5 + f * C6)))))
    return power * power_of_two(np.int32(whole))
