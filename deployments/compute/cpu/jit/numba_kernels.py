"""What numba lacks: bfloat16, pointers from addresses, and arithmetic on the bits of a float32.

torch hands out addresses, and numpy has no bfloat16: its values are read as 16-bit integers, which
are the upper half of a float32.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic


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
