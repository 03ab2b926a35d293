"""Writes code of vectors: what llvmlite's builder says in one instruction after the other.

A vector has as many lanes as 32-bit words stand in it. Elements in memory are float32 or bfloat16,
which is the upper half of a float32; all arithmetic is in float32. Addresses are pointers to bytes,
and offsets are bytes.

Source: https://llvm.org/docs/LangRef.html
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir

Value = Any
"""A value of llvmlite's builder, which brings no types."""

I16, I32, I64, F32, F64 = (
    *(ir.IntType(bits) for bits in (16, 32, 64)),
    ir.FloatType(),
    ir.DoubleType(),
)
POINTER = ir.PointerType()

LOG2_E = 1.4426950408889634

EXP2 = tuple(
    float(c)
    for c in np.polynomial.Chebyshev.interpolate(np.exp2, 6, domain=[0, 1])
    .convert(kind=np.polynomial.Polynomial)
    .coef
)
"""The polynomial of degree 6 that interpolates 2 ** x at Chebyshev's points of [0, 1]; its relative
error there is below that of a float32."""


class VectorBuilder:
    """Writes a function of one pointer.

    Attributes:
        module: What it stands in, and the function's name.
        builder: llvmlite's, for scalars and branches.
        reals: The type of a vector of float32.
        words: The type of a vector of integers of as many bits.
        argument: The function's argument.
    """

    def __init__(self, name: str, lanes: int, is_bfloat16: bool) -> None:
        """Open the function.

        Args:
            name: Of the module and of the function.
            lanes: Of a vector; a power of two.
            is_bfloat16: Whether elements in memory are bfloat16; float32 if not.
        """
        self.lanes = lanes
        self.is_bfloat16 = is_bfloat16
        self.itemsize = 2 if is_bfloat16 else 4
        self.reals = ir.VectorType(F32, lanes)
        self.words = ir.VectorType(I32, lanes)
        self.module = ir.Module(name)
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [POINTER]), name)
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        (self.argument,) = function.args

    @contextmanager
    def each(self, stop: Value, step: int) -> Iterator[Value]:
        """Write a loop over 0, step, ... below stop, which is at least 1."""
        b = self.builder
        before, body, after = b.block, b.append_basic_block("body"), b.append_basic_block("after")
        b.branch(body)
        b.position_at_end(body)
        index = b.phi(I64)
        yield index
        following = b.add(index, I64(step))
        index.add_incoming(I64(0), before)
        index.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, stop), body, after)
        b.position_at_end(after)

    def array(self, size: int) -> Value:
        """Return the address of so many float32."""
        return self._allocated(F32, size)

    def place(self, kind: ir.Type) -> Value:
        """Return the address of a variable; the optimizer makes a register of it."""
        with self.builder.goto_entry_block():
            return self._allocated(kind, 1)

    def _allocated(self, kind: ir.Type, size: int) -> Value:
        place = self.builder.alloca(kind, size)
        place.type = POINTER  # llvmlite would have it a pointer to this kind alone
        return place

    def offset(self, base: Value, num_bytes: Value | int) -> Value:
        """Write an address so many bytes behind another."""
        offset = I64(num_bytes) if isinstance(num_bytes, int) else num_bytes
        return self.builder.gep(base, [offset], source_etype=ir.IntType(8))

    def read(self, place: Value) -> Value:
        """Write the vector of float32 that a variable holds."""
        return self.builder.load(place, typ=self.reals)

    def load(self, kind: ir.Type, base: Value, at: Value | int) -> Value:
        """Write what stands in memory."""
        return self.builder.load(self.offset(base, at), align=self._alignment(kind), typ=kind)

    def store(self, value: Value, base: Value, at: Value | int) -> None:
        """Write that a value goes to memory."""
        self.builder.store(value, self.offset(base, at), align=self._alignment(value.type))

    def _alignment(self, kind: ir.Type) -> int:
        return self.itemsize if isinstance(kind, ir.VectorType) else 8 if kind == I64 else 4

    def load_wide(self, base: Value, at: Value | int) -> Value:
        """Write the float32 of as many elements as a vector has lanes."""
        b = self.builder
        if not self.is_bfloat16:
            return self.load(self.reals, base, at)
        halves = self.load(ir.VectorType(I16, self.lanes), base, at)
        wide = b.shl(b.zext(halves, self.words), self.constant(16, self.words))
        return b.bitcast(wide, self.reals)

    def widened(self, words: Value) -> Iterator[Value]:
        """Write the float32 of the one or two elements of each word."""
        b = self.builder
        if not self.is_bfloat16:
            yield b.bitcast(words, self.reals)
            return
        yield b.bitcast(b.shl(words, self.constant(16, self.words)), self.reals)
        yield b.bitcast(b.and_(words, self.constant(0xFFFF0000, self.words)), self.reals)

    def narrowed(self, reals: Value) -> Value:
        """Write float32 as they are stored: bfloat16 is the nearest, and even between two."""
        b = self.builder
        if not self.is_bfloat16:
            return reals
        bits = b.bitcast(reals, self.words)
        upper = b.lshr(bits, self.constant(16, self.words))
        is_odd = b.and_(upper, self.constant(1, self.words))
        half = b.add(is_odd, self.constant(0x7FFF, self.words))
        rounded = b.lshr(b.add(bits, half), self.constant(16, self.words))
        return b.trunc(rounded, ir.VectorType(I16, self.lanes))

    def transposed(self, rows: list[Value]) -> list[Value]:
        """Write how `lanes` vectors are transposed: a step for each bit of a lane's number."""
        b, lanes, distance = self.builder, self.lanes, 1
        while distance < lanes:
            low = [i if not i & distance else lanes + i - distance for i in range(lanes)]
            high = [i + distance if not i & distance else lanes + i for i in range(lanes)]
            masks = [ir.Constant(self.words, mask) for mask in (low, high)]
            for i in range(lanes):
                if not i & distance:
                    pair = rows[i], rows[i + distance]
                    rows[i], rows[i + distance] = (b.shuffle_vector(*pair, m) for m in masks)
            distance *= 2
        return rows

    def constant(self, number: float, kind: ir.Type | None = None) -> Value:
        """Return a number, in all lanes if it is a vector; one of float32 unless told."""
        kind = self.reals if kind is None else kind
        if isinstance(kind, ir.VectorType):
            return ir.Constant(kind, [number] * self.lanes)
        return ir.Constant(kind, number)

    def splat(self, scalar: Value) -> Value:
        """Write a vector with a scalar in all lanes."""
        b, kind = self.builder, ir.VectorType(scalar.type, self.lanes)
        first = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        zeros = ir.Constant(self.words, [0] * self.lanes)
        return b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)

    def larger(self, one: Value, other: Value) -> Value:
        """Write the larger of two reals; the first if there is none."""
        b = self.builder
        return b.select(b.fcmp_ordered("<", one, other), other, one)

    def least(self, one: Value, other: Value) -> Value:
        """Write the lesser of two integers."""
        b = self.builder
        return b.select(b.icmp_signed("<", one, other), one, other)

    def fma(self, one: Value, other: Value, added: Value) -> Value:
        """Write one * other + added, rounded once."""
        return self.intrinsic("llvm.fma", added.type, one, other, added)

    def exp(self, x: Value) -> Value:
        """Write the exponential of x <= 0; what is no number stays none."""
        b, kind = self.builder, x.type
        integer = self.words if kind == self.reals else I32
        exponent = b.fmul(x, self.constant(LOG2_E, kind))
        least = self.constant(-126, kind)
        exponent = b.select(b.fcmp_ordered("<", exponent, least), least, exponent)
        whole = self.intrinsic("llvm.floor", kind, exponent)
        fraction = b.fsub(exponent, whole)
        power = self.constant(EXP2[-1], kind)
        for coefficient in EXP2[-2::-1]:
            power = self.fma(power, fraction, self.constant(coefficient, kind))
        biased = b.add(b.fptosi(whole, integer), self.constant(127, integer))
        return b.fmul(power, b.bitcast(b.shl(biased, self.constant(23, integer)), kind))

    def tanh(self, x: Value) -> Value:
        """Write the hyperbolic tangent, by exp(-2|x|), which can't overflow."""
        b = self.builder
        e = self.exp(b.fmul(self.constant(-2), self.intrinsic("llvm.fabs", x.type, x)))
        one = self.constant(1)
        size = b.fdiv(b.fsub(one, e), b.fadd(one, e))
        return self.intrinsic("llvm.copysign", x.type, size, x)

    def intrinsic(self, name: str, kind: ir.Type, *arguments: Value) -> Value:
        """Write a call of what LLVM knows for the type of the last argument.

        Args:
            name: Without the type's.
            kind: Type of the result.
            *arguments: What it is given.
        """
        last = arguments[-1].type
        suffix = {self.reals: f"v{self.lanes}f32", self.words: f"v{self.lanes}i32", F32: "f32"}
        full_name = f"{name}.{suffix[last]}"
        function = self.module.globals.get(full_name)
        if function is None:
            types = ir.FunctionType(kind, [value.type for value in arguments])
            function = ir.Function(self.module, types, full_name)
        # Sums across a vector are added in the fastest order.
        flags = ("reassoc",) if last != self.words else ()
        return self.builder.call(function, arguments, fastmath=flags)
