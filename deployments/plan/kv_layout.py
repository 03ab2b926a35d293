"""How the memory of keys and values is divided: blocks, and the groups of layers that share them.

A block holds the keys and values of `block_size` neighbouring tokens. Layers that keep equally many
tokens of a sequence form a group: those without a window keep all, the others their window. Each
group has blocks of its own, and a running sequence holds one extent in each group.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_SIZE = 256
"""Tokens of a block."""


def layers_by_capacity(windows: Sequence[int | None], max_model_len: int) -> dict[int, int]:
    """Return the groups of layers: tokens of a sequence that they keep, and how many layers do.

    Args:
        windows: For each layer, the most tokens that a query sees; None if it sees all.
        max_model_len: The most tokens of a sequence.

    Returns:
        The number of layers by capacity, the largest capacity first.
    """
    capacities = Counter(min(window or max_model_len, max_model_len) for window in windows)
    return dict(sorted(capacities.items(), reverse=True))


@dataclass(frozen=True, slots=True)
class Extent:
    """Neighbouring blocks of one group.

    Attributes:
        first: The first block.
        num_blocks: How many there are; at least one.
    """

    first: int
    num_blocks: int

    @property
    def end(self) -> int:
        """The block after the last."""
        return self.first + self.num_blocks


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The blocks of all groups.

    Attributes:
        capacities: For each group, the most tokens of a sequence that its layers keep, the most
            first. No two are equal.
        num_blocks: The blocks of each group; enough for at least one sequence of any length.
        block_size: Tokens of a block.
    """

    capacities: tuple[int, ...]
    num_blocks: tuple[int, ...]
    block_size: int = BLOCK_SIZE

    def blocks_for(self, num_tokens: int) -> tuple[int, ...]:
        """Return the blocks that a sequence of `num_tokens` tokens, at least 1, needs by group."""
        return tuple(
            -(-min(num_tokens, capacity) // self.block_size) for capacity in self.capacities
        )


@dataclass(frozen=True, slots=True)
class KVCopy:
    """A copy of neighbouring tokens inside one group; target and source may overlap.

    Attributes:
        group: Index of the group.
        source: The first token to copy, counted from the group's first block.
        target: Where it goes.
        num_tokens: How many tokens to copy.
    """

    group: int
    source: int
    target: int
    num_tokens: int
