"""The kernel of `decode_attention`, written with llvmlite's builder and compiled for this machine.

Each unit of work is one row's key-value head: it stores its newest token, and then attends with all
queries that share the head, a block of tokens after the other, as flash attention does. Tokens lie
in memory one after the other, but a vector shall hold the scores of several of them: so the keys of
so many tokens are transposed in registers, and no sum is ever taken across a vector.

Threads take one unit after the other by a ticket, so that one that has lost its core to another
process does not hold up the rest.

Source: Dao et al., FlashAttention, 2022, for the rescaled sums; https://llvm.org/docs/LangRef.html.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
POINTER = ir.PointerType()

Value = Any
"""A value of llvmlite's builder, which brings no types."""

BLOCK = 128
"""Tokens of a block: its scores stay in the first cache."""

MAX_SUMS = {16: 28, 8: 12, 4: 24}
"""Vectors that stay in registers, by the lanes of each: of AVX-512, AVX2 and others."""

CACHE_LINE = 64
LOG2_E = 1.4426950408889634

EXP2 = tuple(
    float(c)
    for c in np.polynomial.Chebyshev.interpolate(np.exp2, 6, domain=[0, 1])
    .convert(kind=np.polynomial.Polynomial)
    .coef
)
"""The polynomial of degree 6 that interpolates 2 ** x at Chebyshev's points of [0, 1]; its relative
error there is below that of a float32."""

ARGUMENTS = (
    *("query", "query_row", "key", "key_row", "value", "value_row", "output", "output_row"),
    *("keys", "values", "slot_bytes", "slots", "indices", "lengths", "num_units", "num_heads"),
    *("scale", "softcap", "ticket"),
)
"""What the kernel reads, as an array of 64-bit integers: addresses, strides in bytes, counts; scale
and softcap as the bits of a float64. The last counts the units taken."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a kernel is compiled for."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    is_bfloat16: bool

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 2 if self.is_bfloat16 else 4

    @property
    def lanes(self) -> int:
        """Elements of a vector; 0 if a head can't be cut into such vectors."""
        words = self.head_dim * self.itemsize // 4
        fitting = (n for n in (16, 8, 4) if n <= _machine_lanes() and words % n == 0)
        return next(fitting, 0) if self.head_dim % 2 == 0 else 0


@cache
def _machine_lanes() -> int:
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 16
    return 8 if features.get("avx2") else 4


class DecodeKernel:
    """A compiled kernel.

    Attributes:
        address: The function for a parallel region; its argument is an array of `ARGUMENTS`.
    """

    def __init__(self, shape: HeadShape) -> None:
        """Compile for this machine, in about 0.3 s."""
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(),
            features=llvm.get_host_cpu_features().flatten(),
            opt=3,
        )
        module = llvm.parse_assembly(str(_Writer(shape).module))
        module.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
        self._engine = llvm.create_mcjit_compiler(module, machine)  # holds the code
        self._engine.finalize_object()
        self.address = self._engine.get_function_address("attend")


@cache
def make_kernel(shape: HeadShape) -> DecodeKernel:
    """Return the kernel for a shape."""
    return DecodeKernel(shape)


class _Writer:
    """Writes the kernel of one shape.

    Loops over tokens are loops of the kernel; those over lanes, heads of a group and vectors of a
    head are unrolled here, so that all sums stand in registers.
    """

    def __init__(self, shape: HeadShape) -> None:
        self.shape = shape
        self.lanes = shape.lanes
        self.reals = ir.VectorType(F32, self.lanes)
        self.words = ir.VectorType(I32, self.lanes)
        self.token_bytes = shape.num_kv_heads * shape.head_dim * shape.itemsize
        self.module = ir.Module("decode_attention")
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [POINTER]), "attend")
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        num_elements = shape.num_heads * shape.head_dim
        self.head_rows = [self._array(num_elements) for _ in ("query", "totals")]
        self.head_sums = [self._array(shape.num_heads) for _ in ("largest", "norms")]
        self.scores = self._array(shape.group * BLOCK)
        self.factors = self._array(shape.group)
        (arguments,) = function.args
        self.arguments = {
            name: self._load(I64, arguments, 8 * index) for index, name in enumerate(ARGUMENTS[:-1])
        }
        self._take_units(self._offset(arguments, 8 * (len(ARGUMENTS) - 1)))
        self.builder.ret_void()

    def _take_units(self, ticket: Value) -> None:
        b = self.builder
        take, work, end = (b.append_basic_block(name) for name in ("take", "work", "end"))
        b.branch(take)
        b.position_at_end(take)
        unit = b.atomic_rmw("add", ticket, I64(1), "monotonic")
        b.cbranch(b.icmp_signed("<", unit, self.arguments["num_units"]), work, end)
        b.position_at_end(work)
        num_parts = b.udiv(I64(self.shape.num_kv_heads), self.arguments["num_heads"])
        self._attend(b.udiv(unit, num_parts), b.urem(unit, num_parts))
        b.branch(take)
        b.position_at_end(end)

    def _attend(self, row: Value, part: Value) -> None:
        """Write one unit of work: some key-value heads of a row."""
        b, shape = self.builder, self.shape
        self.num_heads = self.arguments["num_heads"]
        slot, index, self.length = (
            self._load(I64, b.inttoptr(self.arguments[name], POINTER), b.mul(row, I64(8)))
            for name in ("slots", "indices", "lengths")
        )
        self.part_bytes = b.mul(self.num_heads, I64(shape.head_dim * shape.itemsize))
        part_at = b.mul(part, self.part_bytes)
        slot_at = b.add(b.mul(slot, self.arguments["slot_bytes"]), part_at)
        self.keys, self.values = (self._address(name, slot_at) for name in ("keys", "values"))
        own = b.mul(index, I64(self.token_bytes))
        for stored, name in ((self.keys, "key"), (self.values, "value")):
            source = self._row(name, row, part_at)
            with self._each(self.part_bytes, 4 * self.lanes) as at:
                self._store(self._load(self.words, source, at), stored, b.add(own, at))
        queries_at = b.mul(part_at, I64(shape.group))
        with self._each_head() as head:
            self._read_query(self._row("query", row, self._group_at(queries_at, head)))
        with self._each(self.length, BLOCK) as start:
            self.count = self._least(I64(BLOCK), b.sub(self.length, start))
            self._fetch(start)
            with self._each_head() as head:
                at = b.mul(head, I64(shape.head_dim * shape.itemsize))
                self._score(self._offset(self.keys, at), start)
                with self._each(I64(shape.group), 1) as member:
                    self._soften(member)
                self._weigh(self._offset(self.values, at), start)
        with self._each_head() as head:
            self._write_output(self._row("output", row, self._group_at(queries_at, head)))

    @contextmanager
    def _each_head(self) -> Iterator[Value]:
        """Write a loop over the unit's key-value heads, with the sums of each in view."""
        shape = self.shape
        with self._each(self.num_heads, 1) as head:
            sums_at = self.builder.mul(head, I64(4 * shape.group))
            rows_at = self.builder.mul(head, I64(4 * shape.group * shape.head_dim))
            self.query, self.totals = (self._offset(a, rows_at) for a in self.head_rows)
            self.largest, self.norms = (self._offset(a, sums_at) for a in self.head_sums)
            yield head

    def _group_at(self, first: Value, head: Value) -> Value:
        shape = self.shape
        group_bytes = shape.group * shape.head_dim * shape.itemsize
        return self.builder.add(first, self.builder.mul(head, I64(group_bytes)))

    def _read_query(self, source: Value) -> None:
        """Write how queries are widened and scaled, and the sums cleared."""
        b = self.builder
        scale = b.fptrunc(b.bitcast(self.arguments["scale"], ir.DoubleType()), F32)
        with self._each(I64(self.shape.group * self.shape.head_dim), self.lanes) as number:
            wide = self._load_wide(source, b.mul(number, I64(self.shape.itemsize)))
            at = b.mul(number, I64(4))
            self._store(b.fmul(wide, self._splat(scale)), self.query, at)
            self._store(self._constant(0), self.totals, at)
        with self._each(I64(self.shape.group), 1) as member:
            at = b.mul(member, I64(4))
            self._store(F32(-math.inf), self.largest, at)
            self._store(F32(0), self.norms, at)

    def _score(self, head_keys: Value, start: Value) -> None:
        """Write the products of the block's keys with all queries, and mask what lies behind."""
        b = self.builder
        softcap = b.fptrunc(b.bitcast(self.arguments["softcap"], ir.DoubleType()), F32)
        is_capped = b.fcmp_ordered(">", softcap, F32(0))
        lane_numbers = ir.Constant(ir.VectorType(I64, self.lanes), list(range(self.lanes)))
        with self._each(self.count, self.lanes) as at:
            first = b.add(start, at)
            last = b.sub(self.length, I64(1))
            tokens = [self._least(b.add(first, I64(i)), last) for i in range(self.lanes)]
            offsets = [b.mul(token, I64(self.token_bytes)) for token in tokens]
            keys = [self._offset(head_keys, offset) for offset in offsets]
            is_seen = b.icmp_signed(
                "<", b.add(self._splat(first), lane_numbers), self._splat(self.length)
            )
            for heads in _chunks(self.shape.group, MAX_SUMS[self.lanes] - self.lanes):
                sums = self._products(keys, heads)
                for head in heads:
                    score = b.load(sums[head], typ=self.reals)
                    with b.if_then(is_capped):
                        self._store(self._capped(score, softcap), sums[head], 0)
                    score = b.load(sums[head], typ=self.reals)
                    score = b.select(is_seen, score, self._constant(-math.inf))
                    self._store(score, self.scores, b.mul(b.add(at, I64(head * BLOCK)), I64(4)))

    def _fetch(self, start: Value) -> None:
        """Write that the block is read once, in the order of the addresses.

        In the order of the heads it would come from memory at a fifth of the speed: the processor
        foresees only what goes straight on.
        """
        b = self.builder
        place = self._place(self.words)
        self._store(self._constant(0, self.words), place, 0)
        for source in (self.keys, self.values):
            block = self._offset(source, b.mul(start, I64(self.token_bytes)))
            with self._each(self.count, 1) as token:
                row = self._offset(block, b.mul(token, I64(self.token_bytes)))
                with self._each(self.part_bytes, CACHE_LINE) as at:
                    read = b.or_(b.load(place, typ=self.words), self._load(self.words, row, at))
                    self._store(read, place, 0)
        used = self._intrinsic("llvm.vector.reduce.or", I32, b.load(place, typ=self.words))
        # Nobody needs the result, which would be reason enough to read nothing.
        b.asm(ir.FunctionType(ir.VoidType(), [I32]), "", "r", [used], side_effect=True)

    def _products(self, keys: Sequence[Value], heads: Sequence[int]) -> dict[int, Value]:
        """Write the products of a vector of keys with some heads' queries; return their places."""
        b, shape = self.builder, self.shape
        sums = {head: self._place(self.reals) for head in heads}
        for place in sums.values():
            self._store(self._constant(0), place, 0)
        elements = 4 // shape.itemsize
        num_words = shape.head_dim // elements
        with self._each(I64(num_words), self.lanes) as word:
            at = b.mul(word, I64(4))
            columns = self._transposed([self._load(self.words, key, at) for key in keys])
            query_at = b.mul(word, I64(4 * elements))
            for number, column in enumerate(columns):
                for part, wide in enumerate(self._widened(column)):
                    for head, place in sums.items():
                        index = head * shape.head_dim + number * elements + part
                        query = self._load(F32, self.query, b.add(query_at, I64(4 * index)))
                        total = b.load(place, typ=self.reals)
                        self._store(self._fma(self._splat(query), wide, total), place, 0)
        return sums

    def _capped(self, score: Value, softcap: Value) -> Value:
        """Write softcap * tanh(score / softcap), by exp(-2|x|), which can't overflow."""
        b = self.builder
        cap = self._splat(softcap)
        x = b.fdiv(score, cap)
        e = self._exp(b.fmul(self._constant(-2), self._intrinsic("llvm.fabs", x.type, x)))
        one = self._constant(1)
        size = b.fmul(cap, b.fdiv(b.fsub(one, e), b.fadd(one, e)))
        return self._intrinsic("llvm.copysign", x.type, size, x)

    def _soften(self, member: Value) -> None:
        """Write a query's weights in the place of its scores, against the largest so far."""
        b = self.builder
        scores = self._offset(self.scores, b.mul(member, I64(4 * BLOCK)))
        own = b.mul(member, I64(4))
        place = self._place(self.reals)
        self._store(self._constant(-math.inf), place, 0)
        with self._each(self.count, self.lanes) as number:
            score = self._load(self.reals, scores, b.mul(number, I64(4)))
            self._store(self._larger(b.load(place, typ=self.reals), score), place, 0)
        before = self._load(F32, self.largest, own)
        found = self._intrinsic("llvm.vector.reduce.fmax", F32, b.load(place, typ=self.reals))
        largest = self._larger(before, found)
        self._store(self._constant(0), place, 0)
        with self._each(self.count, self.lanes) as number:
            at = b.mul(number, I64(4))
            score = self._load(self.reals, scores, at)
            weight = self._exp(b.fsub(score, self._splat(largest)))
            self._store(weight, scores, at)
            self._store(b.fadd(b.load(place, typ=self.reals), weight), place, 0)
        factor = self._exp(b.fsub(before, largest))
        weights = b.load(place, typ=self.reals)
        added = self._intrinsic("llvm.vector.reduce.fadd", F32, F32(0), weights)
        norm = self._fma(self._load(F32, self.norms, own), factor, added)
        self._store(largest, self.largest, own)
        self._store(norm, self.norms, own)
        self._store(factor, self.factors, own)

    def _weigh(self, head_values: Value, start: Value) -> None:
        """Write the sums of the block's values by their weights, added to those so far."""
        most = MAX_SUMS[self.lanes]
        block_at = self.builder.mul(start, I64(self.token_bytes))
        for heads in _chunks(self.shape.group, most // 2):
            fitting = max(1, (most - len(heads)) // len(heads))  # the weights stand there too
            vectors = self.shape.head_dim // self.lanes
            width = max(n for n in range(1, fitting + 1) if vectors % n == 0)
            with self._each(I64(self.shape.head_dim), self.lanes * width) as first:
                self._weigh_part(self._offset(head_values, block_at), heads, first, width)

    def _weigh_part(self, block: Value, heads: Sequence[int], first: Value, width: int) -> None:
        b, head_dim = self.builder, self.shape.head_dim
        places = {(head, v): self._place(self.reals) for head in heads for v in range(width)}

        def total_at(head: int, v: int) -> Value:
            return b.mul(b.add(first, I64(head * head_dim + v * self.lanes)), I64(4))

        for (head, v), place in places.items():
            factor = self._splat(self._load(F32, self.factors, 4 * head))
            total = self._load(self.reals, self.totals, total_at(head, v))
            self._store(b.fmul(total, factor), place, 0)
        with self._each(self.count, 1) as token:
            source = self._offset(block, b.mul(token, I64(self.token_bytes)))
            for v in range(width):
                at = b.mul(b.add(first, I64(v * self.lanes)), I64(self.shape.itemsize))
                wide = self._load_wide(source, at)
                for head in heads:
                    weight_at = b.mul(b.add(token, I64(head * BLOCK)), I64(4))
                    weight = self._splat(self._load(F32, self.scores, weight_at))
                    place = places[head, v]
                    self._store(self._fma(weight, wide, b.load(place, typ=self.reals)), place, 0)
        for (head, v), place in places.items():
            self._store(b.load(place, typ=self.reals), self.totals, total_at(head, v))

    def _write_output(self, target: Value) -> None:
        b, head_dim = self.builder, self.shape.head_dim
        with self._each(I64(self.shape.group), 1) as member:
            norm = self._splat(self._load(F32, self.norms, b.mul(member, I64(4))))
            with self._each(I64(head_dim), self.lanes) as number:
                place = b.add(b.mul(member, I64(head_dim)), number)
                mean = b.fdiv(self._load(self.reals, self.totals, b.mul(place, I64(4))), norm)
                at = b.mul(place, I64(self.shape.itemsize))
                self._store(self._narrowed(mean), target, at)

    def _exp(self, x: Value) -> Value:
        """Write exp(x) for x <= 0; what is no number stays none."""
        b, kind = self.builder, x.type
        integer = self.words if kind == self.reals else I32
        exponent = b.fmul(x, self._constant(LOG2_E, kind))
        least = self._constant(-126, kind)
        exponent = b.select(b.fcmp_ordered("<", exponent, least), least, exponent)
        whole = self._intrinsic("llvm.floor", kind, exponent)
        fraction = b.fsub(exponent, whole)
        power = self._constant(EXP2[-1], kind)
        for coefficient in EXP2[-2::-1]:
            power = self._fma(power, fraction, self._constant(coefficient, kind))
        biased = b.add(b.fptosi(whole, integer), self._constant(127, integer))
        return b.fmul(power, b.bitcast(b.shl(biased, self._constant(23, integer)), kind))

    def _transposed(self, rows: list[Value]) -> list[Value]:
        """Write the transposition of `lanes` vectors, in as many steps as a lane's number has bits."""
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

    def _widened(self, words: Value) -> Iterator[Value]:
        """Write the float32 of the one or two elements of each word."""
        b = self.builder
        if not self.shape.is_bfloat16:
            yield b.bitcast(words, self.reals)
            return
        yield b.bitcast(b.shl(words, self._constant(16, self.words)), self.reals)
        yield b.bitcast(b.and_(words, self._constant(0xFFFF0000, self.words)), self.reals)

    def _load_wide(self, base: Value, at: Value | int) -> Value:
        """Write the float32 of as many elements as a vector has lanes."""
        b = self.builder
        if not self.shape.is_bfloat16:
            return self._load(self.reals, base, at)
        halves = self._load(ir.VectorType(I16, self.lanes), base, at)
        wide = b.shl(b.zext(halves, self.words), self._constant(16, self.words))
        return b.bitcast(wide, self.reals)

    def _narrowed(self, reals: Value) -> Value:
        """Write float32 as they are stored: bfloat16 is the nearest, and even between two."""
        b = self.builder
        if not self.shape.is_bfloat16:
            return reals
        bits = b.bitcast(reals, self.words)
        upper = b.lshr(bits, self._constant(16, self.words))
        is_odd = b.and_(upper, self._constant(1, self.words))
        half = b.add(is_odd, self._constant(0x7FFF, self.words))
        rounded = b.lshr(b.add(bits, half), self._constant(16, self.words))
        return b.trunc(rounded, ir.VectorType(I16, self.lanes))

    def _larger(self, one: Value, other: Value) -> Value:
        b = self.builder
        return b.select(b.fcmp_ordered("<", one, other), other, one)

    def _least(self, one: Value, other: Value) -> Value:
        b = self.builder
        return b.select(b.icmp_signed("<", one, other), one, other)

    def _fma(self, one: Value, other: Value, added: Value) -> Value:
        return self._intrinsic("llvm.fma", added.type, one, other, added)

    def _intrinsic(self, name: str, kind: ir.Type, *arguments: Value) -> Value:
        """Write a call of what LLVM knows for the type of the last argument."""
        last = arguments[-1].type
        suffix = {self.reals: f"v{self.lanes}f32", self.words: f"v{self.lanes}i32", F32: "f32"}
        full_name = f"{name}.{suffix[last]}"
        function = self.module.globals.get(full_name)
        if function is None:
            types = ir.FunctionType(kind, [value.type for value in arguments])
            function = ir.Function(self.module, types, full_name)
        flags = ("reassoc",) if last != self.words else ()
        return self.builder.call(function, arguments, fastmath=flags)

    @contextmanager
    def _each(self, stop: Value, step: int) -> Iterator[Value]:
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

    def _array(self, size: int) -> Value:
        return self._allocated(F32, size)

    def _place(self, kind: ir.Type) -> Value:
        """Return a variable; the optimizer makes a register of it."""
        with self.builder.goto_entry_block():
            return self._allocated(kind, 1)

    def _allocated(self, kind: ir.Type, size: int) -> Value:
        place = self.builder.alloca(kind, size)
        place.type = POINTER  # llvmlite would have it a pointer to this kind alone
        return place

    def _address(self, name: str, offset: Value) -> Value:
        return self._offset(self.builder.inttoptr(self.arguments[name], POINTER), offset)

    def _row(self, name: str, row: Value, offset: Value) -> Value:
        b = self.builder
        return self._address(name, b.add(b.mul(row, self.arguments[f"{name}_row"]), offset))

    def _offset(self, base: Value, num_bytes: Value | int) -> Value:
        offset = I64(num_bytes) if isinstance(num_bytes, int) else num_bytes
        return self.builder.gep(base, [offset], source_etype=ir.IntType(8))

    def _load(self, kind: ir.Type, base: Value, at: Value | int) -> Value:
        return self.builder.load(self._offset(base, at), align=self._alignment(kind), typ=kind)

    def _store(self, value: Value, base: Value, at: Value | int) -> None:
        self.builder.store(value, self._offset(base, at), align=self._alignment(value.type))

    def _alignment(self, kind: ir.Type) -> int:
        return self.shape.itemsize if isinstance(kind, ir.VectorType) else 8 if kind == I64 else 4

    def _splat(self, scalar: Value) -> Value:
        b, kind = self.builder, ir.VectorType(scalar.type, self.lanes)
        first = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        zeros = ir.Constant(self.words, [0] * self.lanes)
        return b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)

    def _constant(self, number: float, kind: ir.Type | None = None) -> Value:
        kind = self.reals if kind is None else kind
        if isinstance(kind, ir.VectorType):
            return ir.Constant(kind, [number] * self.lanes)
        return ir.Constant(kind, number)


def _chunks(count: int, most: int) -> Iterator[range]:
    """Yield ranges of about equal size that together are range(count)."""
    number = -(-count // most)
    size = -(-count // number)
    yield from (range(i, min(i + size, count)) for i in range(0, count, size))
