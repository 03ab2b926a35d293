"""How rows and columns are divided into tiles, and how a processor multiplies a tile's elements.

`small_batch_kernel` emits a function for each tiling of each arithmetic, and `small_batch_linear`
divides a layer's rows by the same tilings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from deployments.compute.cpu.linear.packed_layout import BLOCK

WORD_BYTES = BLOCK * 4
"""Bytes of the weights of a word of inputs, for all columns of a block."""

UNROLLED = 4
"""Words of inputs in one turn of a tile's loop."""

GROUP_ROWS = 64
"""Rows that a thread computes at a time where blocks of columns are too few for all threads."""

MAX_GROUP_ROWS = 2 * GROUP_ROWS
"""A group has fewer rows than this where a layer is computed in parts."""

CACHE_LINE = 64

UNPACKED_BYTES = 64 * 2**10
"""Most bytes of a strip's elements that are used for all rows before the next ones. They stay in an
L2 cache; parts that fit into an L1 cache were no faster, as their sums wait in memory."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a processor multiplies the elements of one type.

    Attributes:
        is_bfloat16: Whether elements are bfloat16; otherwise they are float32.
        lanes: Sums, or columns, in one vector.
        max_tile_rows: Rows of a tile: their sums, and their addresses, must stay in registers. Only
            15 registers can hold an address: tiles of 12 rows took 1.5 times as long.
        max_wide_rows: The most rows of a wide tile.
        products_per_us: Products that one thread computes in a microsecond, unless it waits for the
            weights.
        weight_bits: Bits of a quantized weight, 4 or 8; None if weights are elements.
        has_vbmi: Whether there is AVX512_VBMI, which looks up bytes.
    """

    is_bfloat16: bool
    lanes: int
    max_tile_rows: int
    max_wide_rows: int
    products_per_us: int
    weight_bits: int | None = None
    has_vbmi: bool = False

    @property
    def looks_up_bytes(self) -> bool:
        """Whether the bytes of each element are looked up by the integer's size."""
        return self.is_bfloat16 and self.weight_bits == 8 and self.has_vbmi

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 2 if self.is_bfloat16 else 4

    @property
    def fetched_ahead(self) -> int:
        """Bytes between the weights that a wide tile uses and those that it fetches.

        Six rows of bfloat16 took a tenth longer with 2048, and one row of int4 with 1024.
        """
        return 1024 if self.weight_bits is None else 4096

    @property
    def turn_inputs(self) -> int:
        """Inputs of a turn."""
        return UNROLLED * self.word_inputs

    @property
    def turn_bytes(self) -> int:
        """Bytes of the weights of a turn, in memory."""
        return UNROLLED * WORD_BYTES * (self.weight_bits or self.element_bits) // self.element_bits

    @property
    def element_bits(self) -> int:
        """Bits of an element."""
        return 8 * self.itemsize

    @property
    def elements(self) -> int:
        """Elements of a vector."""
        return 32 * self.lanes // self.element_bits

    @property
    def packed_vectors(self) -> int:
        """Vectors of elements that one vector of quantized weights unpacks to."""
        return 1 if self.weight_bits is None else self.element_bits // self.weight_bits

    @property
    def word_inputs(self) -> int:
        """Inputs in a word."""
        return 4 // self.itemsize

    @property
    def strip(self) -> int:
        """Columns of a tile."""
        return 2 * self.lanes

    @property
    def num_strips(self) -> int:
        """Strips of a block."""
        return BLOCK // self.strip

    @property
    def strip_turn_bytes(self) -> int:
        """Bytes of a strip's quantized weights of a turn, which are together in memory."""
        return self.turn_bytes // self.num_strips


AVX512_BF16 = Arithmetic(True, lanes=16, max_tile_rows=8, max_wide_rows=6, products_per_us=200_000)
AVX512 = Arithmetic(False, lanes=16, max_tile_rows=8, max_wide_rows=6, products_per_us=60_000)
AVX2 = Arithmetic(False, lanes=8, max_tile_rows=6, max_wide_rows=1, products_per_us=25_000)


@dataclass(frozen=True, slots=True)
class Tiling:
    """The division of rows into tiles.

    Attributes:
        num_tiles: Tiles of a strip. The last one ends with the last row, and may overlap.
        tile_rows: Rows of each tile; the most that fit if there are `GROUP_ROWS` or more.
        lines: Cache lines that a tile fetches in a turn.
        is_wide: Whether the only tile computes all columns of a block, which is one strip then.
    """

    num_tiles: int
    tile_rows: int
    lines: int
    is_wide: bool

    @classmethod
    @cache
    def of(cls, num_rows: int, arithmetic: Arithmetic) -> "Tiling":
        """Return the tiling with the fewest tiles."""
        num_tiles = -(-num_rows // arithmetic.max_tile_rows)
        turn_lines = arithmetic.turn_bytes // CACHE_LINE
        is_wide = num_rows <= arithmetic.max_wide_rows
        num_strips = 1 if is_wide else arithmetic.num_strips
        lines = -(-turn_lines // (num_tiles * num_strips))
        return cls(num_tiles, -(-num_rows // num_tiles), lines, is_wide)

    def name(self, *, is_last: bool, unpacks: bool) -> str:
        """Return the name of a function that computes such a tile.

        A wide tile has only one, as it computes all inputs at once and reads each weight only once.

        Args:
            is_last: Whether it writes the output; otherwise it leaves the sums in memory.
            unpacks: Whether it unpacks quantized weights; otherwise it finds elements.
        """
        name = f"tile_{self.tile_rows}_{self.lines}"
        if self.is_wide:
            return name
        return name + ("" if is_last else "_sums") + ("_unpacking" if unpacks else "")


def find_arithmetic(found: Mapping[str, bool], *, is_bfloat16: bool) -> Arithmetic | None:
    """Return how a processor with these features multiplies, as far as the kernel knows.

    In bfloat16 it needs AVX512_BF16, and leaves a processor with AMX to oneDNN, which uses its
    matrix units.
    """
    if is_bfloat16:
        has_dot = found.get("avx512bf16") and not found.get("amx-bf16")
        return AVX512_BF16 if has_dot else None
    if found.get("avx512f"):
        return AVX512
    return AVX2 if found.get("avx2") and found.get("fma") else None
