"""The extents of all holders in all groups of layers, and the copies that keep them in order."""

import math
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from deployments.engine.scheduling.block_pool import BlockPool, Move
from deployments.plan.kv_layout import KVCopy, KVLayout

Holder = TypeVar("Holder", bound=Hashable)
Blocks = tuple[int, ...]
"""A number of blocks for each group."""


class KVExtents(Generic[Holder]):
    """One extent in each group for each holder."""

    def __init__(self, layout: KVLayout) -> None:
        """Start with all blocks free."""
        self.layout = layout
        self.pools = tuple(BlockPool[Holder](number) for number in layout.num_blocks)
        self._starts: dict[Holder, tuple[int, ...]] = {}  # kept until something moves

    @property
    def num_free(self) -> Blocks:
        """The free blocks."""
        return tuple(pool.num_free for pool in self.pools)

    def num_blocks_of(self, holder: Holder) -> Blocks:
        """Return the blocks that a holder has."""
        return tuple(pool[holder].num_blocks for pool in self.pools)

    def num_tokens_in(self, holder: Holder) -> float:
        """Return how many tokens fit into a holder's extents; a full ring takes any number."""
        sizes = (number * self.layout.block_size for number in self.num_blocks_of(holder))
        capacities = self.layout.capacities
        partial = [s for s, capacity in zip(sizes, capacities, strict=True) if s < capacity]
        return min(partial, default=math.inf)

    def starts_of(self, holder: Holder) -> tuple[int, ...]:
        """Return the first token of a holder's extent in each group."""
        starts = self._starts.get(holder)
        if starts is None:
            size = self.layout.block_size
            starts = tuple(pool[holder].first * size for pool in self.pools)
            self._starts[holder] = starts
        return starts

    def take(self, holder: Holder, wanted: Blocks) -> list[KVCopy]:
        """Give a new holder extents; as many blocks must be free.

        Returns:
            The copies that make room.
        """
        return self._copies(
            pool.take(holder, number) for pool, number in zip(self.pools, wanted, strict=True)
        )

    def extend(self, holder: Holder, wanted: Blocks) -> list[KVCopy]:
        """Lengthen a holder's extents where they are shorter; enough blocks must be free.

        Returns:
            The copies that make room.
        """
        return self._copies(
            pool.extend(holder, number) if number > pool[holder].num_blocks else []
            for pool, number in zip(self.pools, wanted, strict=True)
        )

    def pass_on(self, holder: Holder, heir: Holder, num_tokens: int) -> None:
        """Give a holder's extents to a new one, cut to what `num_tokens` tokens need."""
        self._starts.pop(holder, None)
        wanted = self.layout.blocks_for(num_tokens)
        for pool, num_blocks in zip(self.pools, wanted, strict=True):
            pool.pass_on(holder, heir)
            if num_blocks < pool[heir].num_blocks:
                pool.cut(heir, num_blocks)

    def give_back(self, holder: Holder) -> None:
        """Free a holder's extents."""
        self._starts.pop(holder, None)
        for pool in self.pools:
            pool.give_back(holder)

    def copy(self, source: Holder, target: Holder, num_tokens: int, num_held: int) -> list[KVCopy]:
        """Return the copies of a holder's first tokens; a ring that has wrapped goes as a whole.

        Args:
            source: Who has them.
            target: Who gets them.
            num_tokens: How many are wanted.
            num_held: How many the source has stored.
        """
        starts = zip(self.starts_of(source), self.starts_of(target), strict=True)
        return [
            KVCopy(group, first, to, capacity if num_held > capacity else num_tokens)
            for group, ((first, to), capacity) in enumerate(
                zip(starts, self.layout.capacities, strict=True)
            )
        ]

    def _copies(self, moves_by_group: Iterable[list[Move] | None]) -> list[KVCopy]:
        size, copies = self.layout.block_size, list[KVCopy]()
        for group, moves in enumerate(moves_by_group):
            assert moves is not None, "enough blocks were free"
            copies += [
                KVCopy(group, move.source * size, move.target * size, move.num_blocks * size)
                for move in moves
            ]
        if copies:
            self._starts.clear()
        return copies
