"""Emits vector code with llvmlite's builder.

A lane of a vector is a 32-bit word. Elements in memory are float32 or bfloat16, which is the upper
half of a float32; all sums are in float32. Addresses are pointers to bytes, and offsets count
bytes.

Source: https://llvm.org/docs/LangRef.html; `vdpbf16ps` in Intel's Intrinsics Guide (AVX512_BF16).
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from llvmlite import ir

from deployments.plan.processor import has_bfloat16

Value = Any
"""A value of llvmlite's builder; llvmlite ships no type information."""

I16, I32, I64, F32, F64 = (
    *(ir.IntType(bits) for bits in (16, 32, 64)),
    ir.FloatType(),
    ir.DoubleType(),
)
POINTER = ir.PointerType()


class _BFloat(ir.Type):  # type: ignore[misc] # llvmlite ships no type information
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


BFLOAT = _BFloat()

LOG2_E = 1.4426950408889634

EXP2 = tuple(
    float(c)
    for c in np.polynomial.Chebyshev.interpolate(np.exp2, 6, domain=[0, 1])
    .convert(kind=np.polynomial.Polynomial)
    .coef
)
"""Coefficients of the polynomial of degree 6 that interpolates 2 ** x at the Chebyshev points of
[0, 1]; its relative error there is below that of a float32."""


@dataclass(slots=True)
class Carried:
    """The values that a loop carries from one turn to the next.

    Attributes:
        values: Those of this turn; the loop's body replaces them by those of the next.
    """

    values: list[Value]


class VectorBuilder:
    """Emits a function.

    Attributes:
        module: The function's module.
        builder: llvmlite's builder, for scalars and branches.
        floats: The type of a vector of float32.
        words: The type of a vector of 32-bit integers.
        arguments: The function's arguments.
    """

    def __init__(
        self,
        name: str,
        lanes: int,
        is_bfloat16: bool,
        *,
        kinds: Sequence[ir.Type] = (POINTER,),
        module: ir.Module | None = None,
        has_avx512_bf16: bool | None = None,
    ) -> None:
        """Start emitting the function.

        Args:
            name: The function's name.
            lanes: Number of lanes of a vector; a power of two.
            is_bfloat16: Whether elements in memory are bfloat16; otherwise they are float32.
            kinds: The types of the function's arguments.
            module: The module to add it to; None makes one of the same name.
            has_avx512_bf16: Whether the function may use AVX512_BF16 for bfloat16; None uses it if
                this processor has it.
        """
        self._set_lanes(lanes)
        self.is_bfloat16 = is_bfloat16
        self.itemsize = 2 if is_bfloat16 else 4
        self._has_avx512_bf16 = has_bfloat16() if has_avx512_bf16 is None else has_avx512_bf16
        self.module = ir.Module(name) if module is None else module
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), kinds), name)
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self.arguments: tuple[Value, ...] = function.args

    def _set_lanes(self, lanes: int) -> None:
        self.lanes = lanes
        self.floats = ir.VectorType(F32, lanes)
        self.words = ir.VectorType(I32, lanes)

    def with_lanes(self, lanes: int) -> Self:
        """Return an emitter of the same function whose vectors have another number of lanes."""
        other = copy.copy(self)
        other._set_lanes(lanes)
        return other

    @property
    def argument(self) -> Value:
        """The argument of a function of one."""
        (argument,) = self.arguments
        return argument

    @contextmanager
    def loop(self, stop: Value, step: int) -> Iterator[Value]:
        """Emit a loop over 0, step, ... below stop, which is at least 1; yield the index."""
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

    @contextmanager
    def span(self, start: Value, stop: Value, step: int) -> Iterator[Value]:
        """Emit a loop over start, start + step, ... below stop, if any; yield the index."""
        b = self.builder
        before = b.block
        head, body, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        b.cbranch(b.icmp_signed("<", index, stop), body, after)
        b.position_at_end(body)
        yield index
        index.add_incoming(start, before)
        index.add_incoming(b.add(index, I64(step)), b.block)
        b.branch(head)
        b.position_at_end(after)

    @contextmanager
    def units(self, ticket: Value, num_units: Value) -> Iterator[Value]:
        """Emit a loop that takes units of work from a ticket counter, one by one; yield the number.

        A thread that has lost its core to another process does not delay the others.
        """
        b = self.builder
        take, work, end = (b.append_basic_block(name) for name in ("take", "work", "end"))
        b.branch(take)
        b.position_at_end(take)
        unit = b.atomic_rmw("add", ticket, I64(1), "monotonic")
        b.cbranch(b.icmp_signed("<", unit, num_units), work, end)
        b.position_at_end(work)
        yield unit
        b.branch(take)
        b.position_at_end(end)

    @contextmanager
    def fold(self, num_turns: Value, initial: Sequence[Value]) -> Iterator[Carried]:
        """Emit a loop of at least one turn that carries values; yield them.

        After the block, they are those that the last turn left.
        """
        b = self.builder
        before, body, after = b.block, b.append_basic_block("turn"), b.append_basic_block("after")
        b.branch(body)
        b.position_at_end(body)
        turn, *phis = (b.phi(value.type) for value in (I64(0), *initial))
        carried = Carried(list(phis))
        yield carried
        following = b.add(turn, I64(1))
        nexts = (following, *carried.values)
        for phi, first, later in zip((turn, *phis), (I64(0), *initial), nexts, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, b.block)
        b.cbranch(b.icmp_signed("<", following, num_turns), body, after)
        b.position_at_end(after)

    def array(self, size: int) -> Value:
        """Emit an array of `size` float32 that begins with a cache line; return its address."""
        return self._allocate(F32, size, align=64)

    def variable(self, kind: ir.Type) -> Value:
        """Emit a variable, which LLVM's optimizer turns into a register; return its address."""
        with self.builder.goto_entry_block():
            return self._allocate(kind, 1)

    def _allocate(self, kind: ir.Type, size: int, align: int | None = None) -> Value:
        place = self.builder.alloca(kind, size)
        place.align = align
        place.type = POINTER  # llvmlite would type it as a pointer to `kind`
        return place

    def offset(self, base: Value, num_bytes: Value | int) -> Value:
        """Emit `base + num_bytes`."""
        offset = I64(num_bytes) if isinstance(num_bytes, int) else num_bytes
        return self.builder.gep(base, [offset], source_etype=ir.IntType(8))

    def read(self, place: Value) -> Value:
        """Emit a load of a variable that holds a vector of float32."""
        return self.builder.load(place, typ=self.floats)

    def load(self, kind: ir.Type, base: Value, at: Value | int) -> Value:
        """Emit a load from `base + at`."""
        return self.builder.load(self.offset(base, at), align=self._alignment(kind), typ=kind)

    def store(self, value: Value, base: Value, at: Value | int) -> None:
        """Emit a store to `base + at`."""
        self.builder.store(value, self.offset(base, at), align=self._alignment(value.type))

    def _alignment(self, kind: ir.Type) -> int:
        if isinstance(kind, ir.VectorType):
            return self.itemsize
        return {I16: 2, I64: 8}.get(kind, 4)

    def load_wide(self, base: Value, at: Value | int) -> Value:
        """Emit a load of `lanes` elements, converted to float32."""
        if not self.is_bfloat16:
            return self.load(self.floats, base, at)
        return self.widen_halves(self.load(ir.VectorType(I16, self.lanes), base, at))

    def widen_halves(self, halves: Value) -> Value:
        """Emit the conversion of the bits of bfloat16, 16-bit integers, to float32."""
        b = self.builder
        wide = b.shl(b.zext(halves, self.words), self.constant(16, self.words))
        return b.bitcast(wide, self.floats)

    def widen(self, words: Value) -> Iterator[Value]:
        """Emit each word's elements as float32: itself, or the lower and upper bfloat16."""
        b = self.builder
        if not self.is_bfloat16:
            yield b.bitcast(words, self.floats)
            return
        yield b.bitcast(b.shl(words, self.constant(16, self.words)), self.floats)
        yield b.bitcast(b.and_(words, self.constant(0xFFFF0000, self.words)), self.floats)

    def narrow(self, floats: Value) -> Value:
        """Emit the conversion of float32 to the stored type; bfloat16 rounds to nearest even.

        AVX512_BF16 rounds subnormal numbers to zero.
        """
        b = self.builder
        if not self.is_bfloat16:
            return floats
        if self._has_avx512_bf16:
            return b.fptrunc(floats, ir.VectorType(BFLOAT, self.lanes))
        bits = b.bitcast(floats, self.words)
        upper = b.lshr(bits, self.constant(16, self.words))
        is_odd = b.and_(upper, self.constant(1, self.words))
        half = b.add(is_odd, self.constant(0x7FFF, self.words))
        rounded = b.lshr(b.add(bits, half), self.constant(16, self.words))
        return b.trunc(rounded, ir.VectorType(I16, self.lanes))

    def rounded(self, floats: Value) -> Value:
        """Emit float32 with the values that they would have after a store and a load."""
        return self.widen_halves(self.narrow(floats)) if self.is_bfloat16 else floats

    def interleave(self, rows: Sequence[Value]) -> Sequence[Value]:
        """Emit the words that hold an element of each row, from a vector of elements of each.

        Args:
            rows: As many vectors of words as a word has elements.
        """
        if not self.is_bfloat16:
            return rows
        b, count = self.builder, 2 * self.lanes
        one, other = (b.bitcast(row, ir.VectorType(I16, count)) for row in rows)
        masks = (
            [n + row * count for n in range(first, first + self.lanes) for row in (0, 1)]
            for first in (0, self.lanes)
        )
        kind = ir.VectorType(I32, count)
        mixed = (b.shuffle_vector(one, other, ir.Constant(kind, mask)) for mask in masks)
        return [b.bitcast(each, self.words) for each in mixed]

    def add_products(self, total: Value, one: Value, other: Value) -> Value:
        """Emit `total` plus the products of the elements of each word."""
        b = self.builder
        if self.is_bfloat16 and self._has_avx512_bf16:
            pairs = ir.VectorType(BFLOAT, 2 * self.lanes)
            name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}"
            return self.call(
                name, self.floats, total, b.bitcast(one, pairs), b.bitcast(other, pairs)
            )
        for pair in zip(self.widen(one), self.widen(other), strict=True):
            total = self.fma(*pair, total)
        return total

    def transpose(self, rows: list[Value]) -> list[Value]:
        """Emit the transposition of `lanes` vectors, in one step per bit of a lane's index."""
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

    def real(self, bits: Value) -> Value:
        """Emit the float32 nearest to the float64 with these bits; see `launch.bits_of`."""
        return self.builder.fptrunc(self.builder.bitcast(bits, F64), F32)

    def constant(self, number: float, kind: ir.Type | None = None) -> Value:
        """Return a constant, by default a vector of float32; a vector has it in all lanes."""
        kind = self.floats if kind is None else kind
        if isinstance(kind, ir.VectorType):
            return ir.Constant(kind, [number] * self.lanes)
        return ir.Constant(kind, number)

    def splat(self, scalar: Value) -> Value:
        """Emit a vector with a scalar in all lanes."""
        b, kind = self.builder, ir.VectorType(scalar.type, self.lanes)
        first = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        zeros = ir.Constant(self.words, [0] * self.lanes)
        return b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)

    def maximum(self, one: Value, other: Value) -> Value:
        """Emit the larger of two floats; `one` if either is NaN."""
        b = self.builder
        return b.select(b.fcmp_ordered("<", one, other), other, one)

    def minimum(self, one: Value, other: Value) -> Value:
        """Emit the smaller of two integers."""
        b = self.builder
        return b.select(b.icmp_signed("<", one, other), one, other)

    def fma(self, one: Value, other: Value, added: Value) -> Value:
        """Emit one * other + added, rounded once."""
        return self.intrinsic("llvm.fma", added.type, one, other, added)

    def exp(self, x: Value) -> Value:
        """Emit the exponential of x <= 0; NaN stays NaN."""
        b, kind = self.builder, x.type
        integer = self.words if kind == self.floats else I32
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
        """Emit the hyperbolic tangent by exp(-2|x|), which can't overflow."""
        b = self.builder
        e = self.exp(b.fmul(self.constant(-2), self.intrinsic("llvm.fabs", x.type, x)))
        one = self.constant(1)
        size = b.fdiv(b.fsub(one, e), b.fadd(one, e))
        return self.intrinsic("llvm.copysign", x.type, size, x)

    def intrinsic(self, name: str, kind: ir.Type, *arguments: Value) -> Value:
        """Emit a call of an LLVM intrinsic, overloaded by the type of the last argument.

        Args:
            name: The intrinsic's name without its type suffix.
            kind: Type of the result.
            *arguments: Arguments of the intrinsic.
        """
        last = arguments[-1].type
        suffix = {self.floats: f"v{self.lanes}f32", self.words: f"v{self.lanes}i32", F32: "f32"}
        # Sums across a vector may be added in the fastest order.
        flags = ("reassoc",) if name.startswith("llvm.vector.reduce.f") else ()
        return self.call(f"{name}.{suffix[last]}", kind, *arguments, flags=flags)

    def prefetch(self, place: Value) -> None:
        """Emit a fetch of a cache line into the L2 cache."""
        read, second_level, data = I32(0), I32(2), I32(1)
        self.call("llvm.prefetch.p0", ir.VoidType(), place, read, second_level, data)

    def call(self, name: str, kind: ir.Type, *arguments: Value, flags: Sequence[str] = ()) -> Value:
        """Emit a call of a function outside the module, such as an LLVM intrinsic.

        Args:
            name: The function's full name.
            kind: Type of the result.
            *arguments: Arguments of the function.
            flags: What LLVM may do to floats.
        """
        function = self.module.globals.get(name)
        if function is None:
            types = ir.FunctionType(kind, [value.type for value in arguments])
            function = ir.Function(self.module, types, name)
        return self.builder.call(function, arguments, fastmath=flags)
