"""Emits the unpacking of quantized weights: vectors of integers of 4 or 8 bits become elements.

Source: https://llvm.org/docs/LangRef.html
"""

from collections.abc import Iterable, Iterator

import numpy as np
from llvmlite import ir

from deployments.compute.cpu.jit.vector_builder import BFLOAT, F32, I32, Value, VectorBuilder
from deployments.compute.cpu.linear.tiling import Arithmetic


def _bfloat16_bits(integers: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(np.float32(each).view(np.uint32)) >> 16 for each in integers)


BFLOAT16_INTEGERS = _bfloat16_bits(range(128))
"""The bits of the bfloat16 of 0 to 127."""

BFLOAT16_NEGATIVES = _bfloat16_bits(range(-8, 0))
"""The bits of the bfloat16 of -8 to -1."""


def unpack(v: VectorBuilder, arithmetic: Arithmetic, packed: Value, first: int) -> Iterator[Value]:
    """Emit the elements of a strip's weights of a turn, at `packed + first`, as they are taken."""
    kind = ir.VectorType(ir.IntType(arithmetic.element_bits), arithmetic.elements)
    for at in range(first, first + arithmetic.strip_turn_bytes, 4 * arithmetic.lanes):
        yield from _unpack_vector(v, arithmetic, v.load(kind, packed, at))


def _unpack_vector(v: VectorBuilder, arithmetic: Arithmetic, packed: Value) -> Iterator[Value]:
    """Emit the elements of a vector of signed integers, those in the lowest bits first."""
    b, kind = v.builder, packed.type
    bits, width = arithmetic.weight_bits, arithmetic.element_bits
    assert bits is not None

    def lanes(number: int) -> Value:
        return ir.Constant(kind, [number] * arithmetic.elements)

    if arithmetic.is_bfloat16 and bits == 4:
        # The permutation reads 5 bits of each lane, so each element is there twice.
        table = ir.Constant(kind, [*BFLOAT16_INTEGERS[:8], *BFLOAT16_NEGATIVES] * 2)
        for low in range(0, width, bits):
            shifted = b.lshr(packed, lanes(low))
            yield v.call("llvm.x86.avx512.permvar.hi.512", kind, table, shifted)
    elif arithmetic.looks_up_bytes:
        octets = ir.VectorType(ir.IntType(8), 2 * arithmetic.elements)
        # The permutation reads 7 bits of each byte: all but the sign.
        signed = b.bitcast(packed, octets)
        lower, upper = (
            v.call("llvm.x86.avx512.vpermi2var.qi.512", octets, halves[0], signed, halves[1])
            for halves in _tables(octets)
        )
        upper = b.or_(upper, b.and_(signed, ir.Constant(octets, [0x80] * octets.count)))
        # One half of each run of 16 bytes: what `vpunpcklbw` reads, then what `vpunpckhbw` does.
        for half in (0, 8):
            runs = (range(at + half, at + half + 8) for at in range(0, octets.count, 16))
            mask = [each for run in runs for at in run for each in (at, octets.count + at)]
            mixed = b.shuffle_vector(lower, upper, ir.Constant(ir.VectorType(I32, len(mask)), mask))
            yield b.bitcast(mixed, kind)
    else:
        for low in range(0, width, bits):
            signed = b.ashr(b.shl(packed, lanes(width - bits - low)), lanes(width - bits))
            floats = b.sitofp(signed, ir.VectorType(F32, arithmetic.elements))
            if arithmetic.is_bfloat16:
                floats = b.fptrunc(floats, ir.VectorType(BFLOAT, arithmetic.elements))
            yield floats


def _tables(octets: ir.VectorType) -> Iterator[tuple[Value, Value]]:
    """Yield the lower and the upper bytes of the bfloat16 of 0 to 127, in two vectors each."""
    for shift in (0, 8):
        found = [bits >> shift & 0xFF for bits in BFLOAT16_INTEGERS]
        yield ir.Constant(octets, found[:64]), ir.Constant(octets, found[64:])
