"""The blocks of one group: who holds which, and how holders move together to make room.

It only counts; the table turns its moves into copies. Best fit keeps most gaps at the end of the
memory large, and moves are needed only when the free blocks would suffice but lie apart.

It also knows which free blocks have memory that can be given back. A block that has been held is
dirty, also after it was freed. A dirty block that stays free from one call of `age` to the next but
one is idle, and a block that is held is not.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from deployments.plan.kv_layout import Extent

Holder = TypeVar("Holder", bound=Hashable)

CLEAN, DIRTY, AGED, IDLE = range(4)
"""Ages of a block: never held since its memory was given back; held now or since the latest `age`;
free since the latest; free since the one before."""
OLDER: Final = bytes((CLEAN, DIRTY, IDLE, IDLE, *range(4, 256)))
"""For `bytearray.translate`."""


@dataclass(frozen=True, slots=True)
class Move:
    """The new place of an extent; the moves of one call are safe in their order."""

    source: int
    target: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Slide:
    """Extents that move apart, the nearest to the growing one first; it is the first of `down`."""

    num_moved: int
    down: list[Extent]
    up: list[Extent]


class BlockPool(Generic[Holder]):
    """Extents of neighbouring blocks, at most one for each holder."""

    def __init__(self, num_blocks: int) -> None:
        """Start with all blocks free."""
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._extents: dict[Holder, Extent] = {}
        self._ages = bytearray(num_blocks)

    def __getitem__(self, holder: Holder) -> Extent:
        """Return a holder's extent."""
        return self._extents[holder]

    @property
    def holders(self) -> set[Holder]:
        """All who hold an extent."""
        return set(self._extents)

    @property
    def extents(self) -> list[Extent]:
        """All extents in the order of their blocks."""
        return sorted(self._extents.values(), key=_first)

    def take(self, holder: Holder, num_blocks: int) -> list[Move] | None:
        """Give a new holder an extent in the smallest gap that is large enough.

        Returns:
            The moves that make room for it; None if too few blocks are free.
        """
        if num_blocks > self.num_free:
            return None
        moves: list[Move] = []
        fitting = [gap for gap in self._gaps() if gap.num_blocks >= num_blocks]
        if not fitting:
            moves = self._gather(num_blocks)
            fitting = [gap for gap in self._gaps() if gap.num_blocks >= num_blocks]
        best = min(fitting, key=_size)
        self._place(holder, Extent(best.first, num_blocks))
        self.num_free -= num_blocks
        return moves

    def give_back(self, holder: Holder) -> None:
        """Free a holder's extent."""
        self.num_free += self._extents.pop(holder).num_blocks

    def pass_on(self, holder: Holder, heir: Holder) -> None:
        """Give a holder's extent to another holder, which has none."""
        self._extents[heir] = self._extents.pop(holder)

    def cut(self, holder: Holder, num_blocks: int) -> None:
        """Free all but the first blocks of a holder's extent."""
        extent = self._extents[holder]
        self.num_free += extent.num_blocks - num_blocks
        self._extents[holder] = Extent(extent.first, num_blocks)

    def extend(self, holder: Holder, num_blocks: int) -> list[Move] | None:
        """Lengthen a holder's extent to a number of blocks: in place, elsewhere, or by moves.

        Returns:
            The moves; None if too few blocks are free.
        """
        extent = self._extents[holder]
        num_more = num_blocks - extent.num_blocks
        if num_more > self.num_free:
            return None
        slide = self._cheapest_slide(holder, num_more)
        fitting = [gap for gap in self._gaps() if gap.num_blocks >= num_blocks]
        if fitting and slide.num_moved > extent.num_blocks:
            target = min(fitting, key=_size).first
            moves = self._moved([Move(extent.first, target, extent.num_blocks)])
        else:
            moves = self._slide_apart(slide)
        self._place(holder, Extent(self._extents[holder].first, num_blocks))
        self.num_free -= num_more
        return moves

    @property
    def has_aged(self) -> bool:
        """Whether blocks will be idle after the next `age` if they stay free."""
        return AGED in self._ages

    @property
    def has_idle(self) -> bool:
        """Whether blocks are idle."""
        return IDLE in self._ages

    def age(self) -> None:
        """Note which dirty blocks are free; those that have been since the latest call are idle."""
        self._ages = self._ages.translate(OLDER)
        for gap in self._gaps():
            blocks = slice(gap.first, gap.end)
            self._ages[blocks] = self._ages[blocks].replace(bytes((DIRTY,)), bytes((AGED,)))

    def take_idle(self, most: int) -> Extent | None:
        """Return some idle blocks that lie together, which are clean from now on; None if none are.

        Args:
            most: The most blocks to return.
        """
        first = self._ages.find(IDLE)
        if first < 0:
            return None
        end = first
        while end < min(first + most, self.num_blocks) and self._ages[end] == IDLE:
            self._ages[end] = CLEAN
            end += 1
        return Extent(first, end - first)

    def _place(self, holder: Holder, extent: Extent) -> None:
        """Note a holder's extent, whose blocks may be written to from now on."""
        self._extents[holder] = extent
        self._ages[extent.first : extent.end] = bytes((DIRTY,)) * extent.num_blocks

    def _gaps(self) -> Iterator[Extent]:
        """Yield the free blocks between neighbouring extents, in order."""
        end = 0
        for extent in (*self.extents, Extent(self.num_blocks, 0)):
            if extent.first > end:
                yield Extent(end, extent.first - end)
            end = extent.end

    def _gather(self, num_blocks: int) -> list[Move]:
        """Join neighbouring gaps into one that is large enough; move as few blocks as possible."""
        gaps = list(self._gaps())
        best: tuple[int, int, int] | None = None  # blocks to move, first gap, last gap
        first = num_free = 0
        for last, gap in enumerate(gaps):
            num_free += gap.num_blocks
            while num_free - gaps[first].num_blocks >= num_blocks:
                num_free -= gaps[first].num_blocks
                first += 1
            if num_free >= num_blocks:
                num_moved = (
                    gap.first
                    - gaps[first].end
                    - (num_free - gap.num_blocks - gaps[first].num_blocks)
                )
                best = min(best or (num_moved, first, last), (num_moved, first, last))
        assert best is not None
        start, end = gaps[best[1]].first, gaps[best[2]].first
        return self._slide_down([e for e in self.extents if start <= e.first < end], start)

    def _cheapest_slide(self, holder: Holder, num_more: int) -> "_Slide":
        """Return the slide that frees `num_more` blocks behind a holder and moves the fewest."""
        own, extents = self._extents[holder], self.extents
        place = extents.index(own)
        below, above = extents[place::-1], extents[place + 1 :]
        downs = _rooms(below, own.end, [*(e.end for e in below), 0][1:])
        ups = _rooms(above, own.end, [*(e.first for e in above), self.num_blocks][1:])
        ups = [(_first_of(above, self.num_blocks) - own.end, 0), *ups]
        best, num_up = None, len(ups) - 1
        for num_down, (down_room, num_moved) in enumerate([(0, 0), *downs]):
            while num_up > 0 and down_room + ups[num_up - 1][0] >= num_more:
                num_up -= 1
            if down_room + ups[num_up][0] >= num_more:
                slide = _Slide(num_moved + ups[num_up][1], below[:num_down], above[:num_up])
                best = slide if best is None or slide.num_moved < best.num_moved else best
        assert best is not None
        return best

    def _slide_apart(self, slide: "_Slide") -> list[Move]:
        """Move the holder and those below it down, and those above it up."""
        extents, moves = self.extents, list[Move]()
        if slide.down:
            place = extents.index(slide.down[-1])
            moves = self._slide_down(slide.down[::-1], extents[place - 1].end if place else 0)
        if slide.up:
            place = extents.index(slide.up[-1])
            moves += self._slide_up(slide.up, _first_of(extents[place + 1 :], self.num_blocks))
        return moves

    def _slide_down(self, extents: list[Extent], start: int) -> list[Move]:
        """Put neighbouring extents next to each other, the first at `start`."""
        moves: list[Move] = []
        for extent in extents:
            moves.append(Move(extent.first, start, extent.num_blocks))
            start += extent.num_blocks
        return self._moved(moves)

    def _slide_up(self, extents: list[Extent], end: int) -> list[Move]:
        """Put neighbouring extents next to each other, the last before `end`."""
        moves: list[Move] = []
        for extent in reversed(extents):
            end -= extent.num_blocks
            moves.append(Move(extent.first, end, extent.num_blocks))
        return self._moved(moves)

    def _moved(self, moves: list[Move]) -> list[Move]:
        """Note the new places; return the moves that change anything."""
        holders = {extent.first: holder for holder, extent in self._extents.items()}
        for move in moves:
            self._place(holders[move.source], Extent(move.target, move.num_blocks))
        return [move for move in moves if move.source != move.target]


def _first(extent: Extent) -> int:
    return extent.first


def _size(extent: Extent) -> tuple[int, int]:
    return extent.num_blocks, extent.first


def _first_of(extents: list[Extent], end: int) -> int:
    return extents[0].first if extents else end


def _rooms(extents: list[Extent], start: int, bounds: list[int]) -> list[tuple[int, int]]:
    """Return, for the first 1, 2, ... extents: the blocks freed if they slide, and those moved.

    Args:
        extents: Neighbours, the nearest first.
        start: Where the room begins.
        bounds: How far each of them could slide if all before it slide, too.
    """
    rooms: list[tuple[int, int]] = []
    num_moved = 0
    for extent, bound in zip(extents, bounds, strict=True):
        num_moved += extent.num_blocks
        rooms.append((abs(start - bound) - num_moved, num_moved))
    return rooms
