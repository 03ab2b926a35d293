"""The shape of the heads that a kernel of `row_attention` is compiled for."""

from dataclasses import dataclass
from functools import cache

from deployments.plan.processor import features


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of queries, keys and values.

    Attributes:
        head_dim: Elements of a head.
        num_heads: Query heads of a row.
        num_kv_heads: Key heads of a token, and value heads.
        is_bfloat16: Whether elements are bfloat16; otherwise they are float32.
        has_sinks: Whether each query head has an attention sink; see `Scores`.
    """

    head_dim: int
    num_heads: int
    num_kv_heads: int
    is_bfloat16: bool
    has_sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 2 if self.is_bfloat16 else 4

    @property
    def word_elements(self) -> int:
        """Elements of a 32-bit word."""
        return 4 // self.itemsize

    @property
    def head_bytes(self) -> int:
        """Bytes of a head."""
        return self.head_dim * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys, or of its values."""
        return self.num_kv_heads * self.head_bytes

    @property
    def lanes(self) -> int:
        """Vector width for one head, in 32-bit words; 0 if none fits evenly."""
        num_words, rest = divmod(self.head_bytes, 4)
        fitting = (n for n in (16, 8, 4) if n <= machine_lanes() and num_words % n == 0)
        return 0 if rest else next(fitting, 0)


@cache
def machine_lanes() -> int:
    """Return the number of 32-bit words in a vector register of this processor."""
    found = features()
    if found.get("avx512f"):
        return 16
    return 8 if found.get("avx2") else 4
