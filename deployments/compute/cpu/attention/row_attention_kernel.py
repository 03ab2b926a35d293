"""The kernel of `row_attention`, emitted with llvmlite's builder and compiled for this machine.

A unit of work is a row, or one key-value head of a row if there are few rows. The kernel stores the
unit's newest token, and then attends with all queries that share the head; see
`flash_attention_emitter`.

Threads take units one by one from a ticket counter, so a thread that has lost its core to another
process does not delay the rest.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir

from deployments.compute.cpu.attention.flash_attention_emitter import (
    BLOCK,
    FlashAttentionEmitter,
    QueryGroup,
    TokenBlock,
)
from deployments.compute.cpu.attention.head_shape import HeadShape
from deployments.compute.cpu.jit.machine_code import MachineCode
from deployments.compute.cpu.jit.vector_builder import (
    I32,
    I64,
    POINTER,
    Value,
    VectorBuilder,
)

NAME = "attend"
"""The name of the kernel's function."""

CACHE_LINE = 64

ARGUMENTS = (
    *("query", "query_row", "key", "key_row", "value", "value_row", "output", "output_row"),
    *("keys", "values", "starts", "indices", "lengths", "num_units", "num_heads"),
    *("scale", "softcap", "sinks", "ticket"),
)
"""The kernel's arguments, an array of 64-bit integers: addresses, strides in bytes and counts.
`num_heads` is the key-value heads of a unit, scale and softcap are the bits of a float64, sinks the
address of a float32 for each query head (0 if the shape has none), and the ticket counts the units
taken."""


class RowAttentionKernel:
    """A kernel compiled for heads of one shape.

    Attributes:
        shape: The shape of the heads.
        address: The function's address, for a parallel region; its argument is an array of
            `ARGUMENTS`.
        make_arguments: Makes such an array.
    """

    make_arguments = ctypes.c_int64 * len(ARGUMENTS)

    def __init__(self, shape: HeadShape) -> None:
        """Compile for this machine, the first time in about 0.3 s.

        Args:
            shape: A shape with `lanes`.
        """
        self.shape = shape
        self._code = MachineCode.emitted(emit_kernel, shape, optimize=True)
        self.address = self._code.address_of(NAME)


def emit_kernel(shape: HeadShape) -> str:
    """Return the kernel's LLVM IR."""
    return str(_KernelEmitter(shape).vectors.module)


class _KernelEmitter:
    """Emits the loop that takes units, and each unit's work around its attention."""

    def __init__(self, shape: HeadShape) -> None:
        self.shape = shape
        self.vectors = VectorBuilder(NAME, shape.lanes, shape.is_bfloat16)
        self.builder = self.vectors.builder
        num_elements = shape.num_heads * shape.head_dim
        self.totals = self.vectors.array(num_elements)
        self.sums = [self.vectors.array(shape.num_heads) for _ in ("largest", "norms")]
        self.attention = FlashAttentionEmitter(self.vectors, shape)
        self.arguments = {
            name: self.vectors.load(I64, self.vectors.argument, 8 * index)
            for index, name in enumerate(ARGUMENTS[:-1])
        }
        self.num_heads = self.arguments["num_heads"]
        self.part_bytes = self.builder.mul(self.num_heads, I64(shape.head_bytes))
        b = self.builder
        num_parts = b.udiv(I64(shape.num_kv_heads), self.num_heads)
        ticket = self.vectors.offset(self.vectors.argument, 8 * (len(ARGUMENTS) - 1))
        with self.vectors.units(ticket, self.arguments["num_units"]) as unit:
            self._attend(b.udiv(unit, num_parts), b.mul(b.urem(unit, num_parts), self.part_bytes))
        b.ret_void()

    def _attend(self, row: Value, part_at: Value) -> None:
        """Emit one unit: a row's key-value heads that start at the offset `part_at`."""
        v, b, shape = self.vectors, self.builder, self.shape
        start, index, length = (
            v.load(I64, b.inttoptr(self.arguments[name], POINTER), b.mul(row, I64(8)))
            for name in ("starts", "indices", "lengths")
        )
        extent_at = b.add(b.mul(start, I64(shape.token_bytes)), part_at)
        keys, values = (self._address(name, extent_at) for name in ("keys", "values"))
        own = b.mul(index, I64(shape.token_bytes))
        for stored, name in ((keys, "key"), (values, "value")):
            source = self._row(name, row, part_at)
            with v.loop(self.part_bytes, 4 * v.lanes) as at:
                v.store(v.load(v.words, source, at), stored, b.add(own, at))
        scale, softcap = (v.real(self.arguments[name]) for name in ("scale", "softcap"))
        queries = self._row("query", row, b.mul(part_at, I64(shape.group)))
        with self._each_head(queries, part_at) as (_, group):
            self.attention.begin(group)
        with v.loop(length, BLOCK) as first:
            block = TokenBlock(first, v.minimum(I64(BLOCK), b.sub(length, first)), length)
            self._fetch(block, keys, values)
            with self._each_head(queries, part_at) as (head_at, group):
                heads = v.offset(keys, head_at), v.offset(values, head_at)
                self.attention.add(group, block, *heads, scale, softcap)
        with self._each_head(queries, part_at) as (head_at, group):
            output_at = b.mul(b.add(part_at, head_at), I64(shape.group))
            self.attention.end(group, self._row("output", row, output_at))

    @contextmanager
    def _each_head(self, queries: Value, part_at: Value) -> Iterator[tuple[Value, QueryGroup]]:
        """Emit a loop over the unit's key-value heads; yield each one's offset and queries."""
        v, b, shape = self.vectors, self.builder, self.shape
        with v.loop(self.num_heads, 1) as head:
            query = v.offset(queries, b.mul(head, I64(shape.group * shape.head_bytes)))
            totals = v.offset(self.totals, b.mul(head, I64(4 * shape.group * shape.head_dim)))
            sums_at = b.mul(head, I64(4 * shape.group))
            largest, norms = (v.offset(array, sums_at) for array in self.sums)
            head_at = b.mul(head, I64(shape.head_bytes))
            sinks = self._sinks(b.add(part_at, head_at)) if shape.has_sinks else None
            yield head_at, QueryGroup(query, totals, largest, norms, sinks)

    def _sinks(self, head_at: Value) -> Value:
        """Emit the address of the sinks of the key-value head at an offset in a token's heads."""
        b, shape = self.builder, self.shape
        head = b.udiv(head_at, I64(shape.head_bytes))
        return self._address("sinks", b.mul(head, I64(4 * shape.group)))

    def _fetch(self, block: TokenBlock, keys: Value, values: Value) -> None:
        """Emit a read of the whole block in address order, which brings it into the cache.

        Read head by head, it would come from memory at a fifth of the speed, since the hardware
        prefetcher follows only sequential reads.
        """
        v, b = self.vectors, self.builder
        place = v.variable(v.words)
        v.store(v.constant(0, v.words), place, 0)
        token_bytes = I64(self.shape.token_bytes)
        for source in (keys, values):
            first = v.offset(source, b.mul(block.start, token_bytes))
            with v.loop(block.count, 1) as token:
                row = v.offset(first, b.mul(token, token_bytes))
                with v.loop(self.part_bytes, CACHE_LINE) as at:
                    read = b.or_(b.load(place, typ=v.words), v.load(v.words, row, at))
                    v.store(read, place, 0)
        used = v.intrinsic("llvm.vector.reduce.or", I32, b.load(place, typ=v.words))
        # The result is unused; the empty asm keeps LLVM from deleting the loads.
        b.asm(ir.FunctionType(ir.VoidType(), [I32]), "", "r", [used], side_effect=True)

    def _address(self, name: str, offset: Value) -> Value:
        return self.vectors.offset(self.builder.inttoptr(self.arguments[name], POINTER), offset)

    def _row(self, name: str, row: Value, offset: Value) -> Value:
        b = self.builder
        return self._address(name, b.add(b.mul(row, self.arguments[f"{name}_row"]), offset))
