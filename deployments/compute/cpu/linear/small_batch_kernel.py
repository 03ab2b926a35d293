"""The kernel of `small_batch_linear`, emitted as LLVM IR and compiled by llvmlite.

The product of a small batch with a large matrix is bound by memory at one row and by arithmetic at
a hundred. In between, a core waits for memory and computes in turn, unless it prefetches: each tile
fetches a part of the next block of weights into the L2 cache while it computes. With more rows the
kernel is as fast as oneDNN's, and is used because a row's result is the same in any batch.

The weights are in oneDNN's layout: [blocks of 64 columns, pairs of inputs, 64, 2]. A tile computes
some rows of half a block, entirely in registers. Threads take units one by one from a ticket
counter, so a thread that has lost its core to another process does not delay the rest.

Source: https://llvm.org/docs/LangRef.html; `vdpbf16ps` in Intel's Intrinsics Guide (AVX512_BF16).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm

from deployments.compute.cpu.jit.machine_code import MachineCode

BLOCK = 64
"""Columns of a block."""

PAIR_BYTES = BLOCK * 4
"""Bytes of the weights of a pair of inputs, for all columns of a block."""

UNROLLED = 4
"""Pairs of inputs in one iteration of a tile's loop."""

GROUP_ROWS = 64
"""Rows that a thread computes at a time where blocks of columns are too few for all threads."""

MAX_TILE_ROWS = 8
"""Each row needs an address, and only 15 registers can hold one: tiles of 12 rows took 1.5 times as
long."""

CACHE_LINE = 64
VECTOR = 16  # sums, or columns, in one register
HALF = 2 * VECTOR
HALVES = BLOCK // HALF

ARGUMENTS = (
    *("rows", "row_bytes", "weights", "block_bytes", "num_turns", "output", "output_row_bytes"),
    *("bias", "num_units", "tile", "num_tiles", "tile_rows", "num_rows", "fetched_bytes"),
    *("num_groups", "ticket"),
)
"""The kernel's arguments, an array of 64-bit integers. A unit is a group of rows and a block of
columns; `num_tiles` are those of a group. The ticket counts the units taken."""

DECLARATIONS = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare i64 @llvm.smin.i64(i64, i64)
"""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The division of rows into tiles.

    Attributes:
        num_tiles: Tiles of a half block. The last one ends with the last row, and may overlap.
        tile_rows: Rows of each tile; `MAX_TILE_ROWS` of them if there are `GROUP_ROWS` or more.
        lines: Cache lines that a tile fetches in an iteration.
    """

    num_tiles: int
    tile_rows: int
    lines: int

    @classmethod
    @cache
    def of(cls, num_rows: int) -> "Tiling":
        """Return the tiling with the fewest tiles."""
        num_tiles = -(-num_rows // MAX_TILE_ROWS)
        turn_lines = UNROLLED * PAIR_BYTES // CACHE_LINE
        return cls(num_tiles, -(-num_rows // num_tiles), -(-turn_lines // (num_tiles * HALVES)))

    @property
    def name(self) -> str:
        """The name of the function that computes such a tile."""
        return f"tile_{self.tile_rows}_{self.lines}"


class SmallBatchKernel:
    """The compiled kernel.

    Attributes:
        address: The function's address, for a parallel region; its argument is an array of
            `ARGUMENTS`.
        tiles: The addresses of the tilings' functions, by their names. Any number of rows has a
            tiling among those of up to `GROUP_ROWS` rows.
    """

    def __init__(self) -> None:
        """Compile for this machine, in about 0.2 s."""
        tilings = {(tiling := Tiling.of(num)).name: tiling for num in range(1, GROUP_ROWS + 1)}
        functions = {name: "\n".join(_tile(tiling)) for name, tiling in tilings.items()}
        source = "\n".join([DECLARATIONS, *functions.values(), _worker()])
        self._code = MachineCode(source, optimize=False)
        self.address = self._code.address_of("multiply")
        self.tiles = {name: self._code.address_of(name) for name in functions}


@cache
def make_kernel() -> SmallBatchKernel | None:
    """Return the kernel; None on a processor without AVX512_BF16, or with AMX.

    oneDNN uses AMX's matrix units, and this kernel does not.
    """
    features = llvm.get_host_cpu_features()
    if not features.get("avx512bf16") or features.get("amx-bf16"):
        return None
    return SmallBatchKernel()


def _tile(tiling: Tiling) -> Iterator[str]:
    """Emit the function of a tile: it loops over the inputs and keeps all sums in registers."""
    rows, vectors = range(tiling.tile_rows), range(HALF // VECTOR)
    yield (
        f"define void @{tiling.name}(ptr noalias %rows, i64 %row_bytes, ptr noalias %weights,"
        " i64 %num_turns, ptr noalias %output, i64 %output_row_bytes, ptr noalias %bias, ptr %next)"
        " {\nentry:"
    )
    for v in vectors:
        yield f"%bias{v} = getelementptr i8, ptr %bias, i64 {v * VECTOR * 4}"
        yield f"%start{v} = load <16 x float>, ptr %bias{v}, align 4"
    yield from (f"%row_at{r} = mul i64 %row_bytes, {r}" for r in rows)
    yield "br label %turn\nturn:"
    yield "%t = phi i64 [0, %entry], [%t_next, %turn]"
    yield "%rows_at = phi ptr [%rows, %entry], [%rows_next, %turn]"
    yield "%weights_at = phi ptr [%weights, %entry], [%weights_next, %turn]"
    yield "%next_at = phi ptr [%next, %entry], [%next_next, %turn]"
    for r in rows:
        for v in vectors:
            yield (
                f"%sum{r}_{v}_0 = phi <16 x float>"
                f" [%start{v}, %entry], [%sum{r}_{v}_{UNROLLED}, %turn]"
            )
    yield from (f"%row{r} = getelementptr i8, ptr %rows_at, i64 %row_at{r}" for r in rows)
    for line in range(tiling.lines):
        yield f"%line{line} = getelementptr i8, ptr %next_at, i64 {line * CACHE_LINE}"
        # The flags ask for a read of data into the L2 cache.
        yield f"call void @llvm.prefetch.p0(ptr %line{line}, i32 0, i32 2, i32 1)"
    for pair in range(UNROLLED):
        yield from _multiply_pair(pair, rows, vectors)
    yield f"%rows_next = getelementptr i8, ptr %rows_at, i64 {4 * UNROLLED}"
    yield f"%weights_next = getelementptr i8, ptr %weights_at, i64 {PAIR_BYTES * UNROLLED}"
    yield f"%next_next = getelementptr i8, ptr %next_at, i64 {CACHE_LINE * tiling.lines}"
    yield "%t_next = add i64 %t, 1"
    yield "%is_more = icmp ult i64 %t_next, %num_turns"
    yield "br i1 %is_more, label %turn, label %store\nstore:"
    for r in rows:
        yield f"%output_at{r} = mul i64 %output_row_bytes, {r}"
        yield f"%output{r} = getelementptr i8, ptr %output, i64 %output_at{r}"
        for v in vectors:
            yield f"%rounded{r}_{v} = fptrunc <16 x float> %sum{r}_{v}_{UNROLLED} to <16 x bfloat>"
            yield f"%target{r}_{v} = getelementptr i8, ptr %output{r}, i64 {v * VECTOR * 2}"
            yield f"store <16 x bfloat> %rounded{r}_{v}, ptr %target{r}_{v}, align 2"
    yield "ret void\n}"


def _multiply_pair(pair: int, rows: range, vectors: range) -> Iterator[str]:
    """Emit the products of a pair of inputs: each row's pair, broadcast, times the weights."""
    for v in vectors:
        name, offset = f"{pair}_{v}", pair * PAIR_BYTES + v * CACHE_LINE
        yield f"%weight_at{name} = getelementptr i8, ptr %weights_at, i64 {offset}"
        yield f"%weight{name} = load <32 x bfloat>, ptr %weight_at{name}, align 2"
    for r in rows:
        name = f"{pair}_{r}"
        yield f"%pair_at{name} = getelementptr i8, ptr %row{r}, i64 {4 * pair}"
        yield f"%pair{name} = load i32, ptr %pair_at{name}, align 2"
        yield f"%lane{name} = insertelement <16 x i32> poison, i32 %pair{name}, i32 0"
        yield (
            f"%lanes{name} = shufflevector <16 x i32> %lane{name}, <16 x i32> poison,"
            " <16 x i32> zeroinitializer"
        )
        yield f"%input{name} = bitcast <16 x i32> %lanes{name} to <32 x bfloat>"
        for v in vectors:
            yield (
                f"%sum{r}_{v}_{pair + 1} = call <16 x float>"
                " @llvm.x86.avx512bf16.dpbf16ps.512("
                f"<16 x float> %sum{r}_{v}_{pair}, <32 x bfloat> %input{name},"
                f" <32 x bfloat> %weight{pair}_{v})"
            )


def _worker() -> str:
    """Return the function that each thread runs: it takes units until none are left.

    Where groups share their last rows, two threads may write the same values to the same places.
    """
    loads = "\n".join(
        f"%{name}_at = getelementptr i64, ptr %arguments, i64 {index}\n"
        f"%{name} = load i64, ptr %{name}_at"
        for index, name in enumerate(ARGUMENTS[:-1])
    )
    return f"""
define void @multiply(ptr %arguments) {{
entry:
  {loads}
  %rows_to = inttoptr i64 %rows to ptr
  %weights_to = inttoptr i64 %weights to ptr
  %output_to = inttoptr i64 %output to ptr
  %bias_to = inttoptr i64 %bias to ptr
  %compute = inttoptr i64 %tile to ptr
  %ticket = getelementptr i64, ptr %arguments, i64 {len(ARGUMENTS) - 1}
  %last_tile = sub i64 %num_rows, %tile_rows
  %first = atomicrmw add ptr %ticket, i64 1 monotonic
  br label %take
take:
  %unit = phi i64 [%first, %entry], [%after, %taken]
  %is_left = icmp slt i64 %unit, %num_units
  br i1 %is_left, label %work, label %end
work:
  %after = atomicrmw add ptr %ticket, i64 1 monotonic
  %block = udiv i64 %unit, %num_groups
  %group = urem i64 %unit, %num_groups
  %group_tile = mul i64 %group, %num_tiles
  %weights_offset = mul i64 %block, %block_bytes
  %block_weights = getelementptr i8, ptr %weights_to, i64 %weights_offset
  %fetched = call i64 @llvm.smin.i64(i64 %after, i64 %num_units)
  %fetched_block = udiv i64 %fetched, %num_groups
  %fetched_offset = mul i64 %fetched_block, %block_bytes
  %next_weights = getelementptr i8, ptr %weights_to, i64 %fetched_offset
  %output_offset = mul i64 %block, {BLOCK * 2}
  %block_output = getelementptr i8, ptr %output_to, i64 %output_offset
  %bias_offset = mul i64 %block, {BLOCK * 4}
  %block_bias = getelementptr i8, ptr %bias_to, i64 %bias_offset
  br label %half
half:
  %h = phi i64 [0, %work], [%h_next, %half_done]
  %half_weights_offset = mul i64 %h, {HALF * 4}
  %half_weights = getelementptr i8, ptr %block_weights, i64 %half_weights_offset
  %half_output_offset = mul i64 %h, {HALF * 2}
  %half_output = getelementptr i8, ptr %block_output, i64 %half_output_offset
  %half_bias_offset = mul i64 %h, {HALF * 4}
  %half_bias = getelementptr i8, ptr %block_bias, i64 %half_bias_offset
  %part_base = mul i64 %h, %num_tiles
  br label %rows_tile
rows_tile:
  %n = phi i64 [0, %half], [%n_next, %rows_tile]
  %wanted_tile = add i64 %group_tile, %n
  %wanted_row = mul i64 %wanted_tile, %tile_rows
  %row = call i64 @llvm.smin.i64(i64 %wanted_row, i64 %last_tile)
  %row_offset = mul i64 %row, %row_bytes
  %tile_input = getelementptr i8, ptr %rows_to, i64 %row_offset
  %tile_output_offset = mul i64 %row, %output_row_bytes
  %tile_output = getelementptr i8, ptr %half_output, i64 %tile_output_offset
  %part = add i64 %part_base, %n
  %part_offset = mul i64 %part, %fetched_bytes
  %part_weights = getelementptr i8, ptr %next_weights, i64 %part_offset
  call void %compute(ptr %tile_input, i64 %row_bytes, ptr %half_weights, i64 %num_turns,
    ptr %tile_output, i64 %output_row_bytes, ptr %half_bias, ptr %part_weights)
  %n_next = add i64 %n, 1
  %is_more_rows = icmp slt i64 %n_next, %num_tiles
  br i1 %is_more_rows, label %rows_tile, label %half_done
half_done:
  %h_next = add i64 %h, 1
  %is_more_halves = icmp slt i64 %h_next, {HALVES}
  br i1 %is_more_halves, label %half, label %taken
taken:
  br label %take
end:
  ret void
}}
"""
