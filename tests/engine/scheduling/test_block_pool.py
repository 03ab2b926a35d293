"""Blocks are never lost, shared or overwritten, whatever comes, grows and goes."""

from random import Random

import pytest

from deployments.engine.scheduling.block_pool import BlockPool, Move
from deployments.plan.kv_layout import Extent

NUM_EVENTS = 100_000


class NaivePool:
    """A pool beside the contents of its blocks: each holder writes its name and the place."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool[int](num_blocks)
        self.blocks: list[tuple[int, int] | None] = [None] * num_blocks
        self.sizes: dict[int, int] = {}
        self.num_names = 0
        self.num_moved = 0
        self.num_given_back = 0
        self.is_dirty = [False] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self.blocks) - sum(self.sizes.values())

    def check(self, name: int) -> Extent:
        """Check that a holder has all that it wrote."""
        extent = self.pool[name]
        written = [(name, place) for place in range(self.sizes[name])]
        assert self.blocks[extent.first : extent.first + len(written)] == written
        return extent

    def apply(self, moves: list[Move]) -> None:
        for move in moves:
            moved = self.blocks[move.source : move.source + move.num_blocks]
            self.blocks[move.source : move.source + move.num_blocks] = [None] * len(moved)
            target = slice(move.target, move.target + move.num_blocks)
            assert self.blocks[target] == [None] * len(moved)
            self.blocks[target] = moved
            self.is_dirty[target] = [True] * len(moved)
            self.num_moved += move.num_blocks

    def write(self, name: int, num_blocks: int) -> None:
        """Write to the blocks that a holder has won; they must be free."""
        extent = self.pool[name]
        assert extent.num_blocks == num_blocks
        for place in range(self.sizes.get(name, 0), num_blocks):
            assert self.blocks[extent.first + place] is None
            self.blocks[extent.first + place] = (name, place)
            self.is_dirty[extent.first + place] = True
        self.sizes[name] = num_blocks

    def arrive(self, num_blocks: int) -> None:
        self.num_names += 1
        moves = self.pool.take(self.num_names, num_blocks)
        assert (moves is not None) == (num_blocks <= self.num_free)
        if moves is not None:
            self.apply(moves)
            self.write(self.num_names, num_blocks)

    def grow(self, name: int, num_more: int) -> None:
        moves = self.pool.extend(name, self.sizes[name] + num_more)
        assert (moves is not None) == (num_more <= self.num_free)
        if moves is not None:
            self.apply(moves)
            self.check(name)
            self.write(name, self.sizes[name] + num_more)

    def keep(self, name: int, num_blocks: int) -> None:
        extent = self.check(name)
        self.pool.cut(name, num_blocks)
        for place in range(extent.first + num_blocks, extent.end):
            self.blocks[place] = None
        self.sizes[name] = num_blocks

    def rest(self) -> None:
        """Give all memory back that is free for the time of two calls of `age`."""
        self.pool.age()
        self.give_idle_back()
        self.pool.age()
        self.give_idle_back()
        free = [block for block, content in enumerate(self.blocks) if content is None]
        assert not any(self.is_dirty[block] for block in free)
        assert not self.pool.has_idle
        assert not self.pool.has_aged

    def give_idle_back(self) -> None:
        while (extent := self.pool.take_idle(3)) is not None:
            assert 1 <= extent.num_blocks <= 3
            for block in range(extent.first, extent.end):
                assert self.blocks[block] is None, "it is held"
                assert self.is_dirty[block], "it was given back already"
                self.is_dirty[block] = False
                self.num_given_back += 1

    def end(self, name: int) -> None:
        self.keep(name, 0)
        self.pool.give_back(name)
        del self.sizes[name]


@pytest.mark.parametrize("num_blocks", [7, 40, 200])
def test_a_hundred_thousand_arrivals_and_ends_lose_nothing(num_blocks: int) -> None:
    random, naive = Random(num_blocks), NaivePool(num_blocks)
    for _ in range(NUM_EVENTS):
        event = random.random()
        if random.random() < 0.01:
            random.choice([naive.pool.age, naive.give_idle_back, naive.rest])()
        if event < 0.4 or not naive.sizes:
            naive.arrive(random.randint(1, max(1, num_blocks // random.choice([2, 4, 20]))))
            continue
        name = random.choice(list(naive.sizes))
        if event < 0.6:
            naive.grow(name, random.randint(1, 3))
        elif event < 0.7:
            naive.keep(name, random.randint(1, naive.sizes[name]))
        else:
            naive.end(name)
        assert naive.pool.num_free == naive.num_free
    for name in naive.sizes:
        naive.check(name)
    assert naive.num_moved > 0
    assert naive.num_given_back > 0


def test_a_block_is_idle_once_it_has_been_free_between_two_looks() -> None:
    pool = filled(6, 2, 2)
    pool.age()
    pool.give_back(0)
    pool.age()
    assert (pool.has_aged, pool.has_idle) == (True, False)
    pool.take(9, 1)
    pool.age()
    assert pool.take_idle(10) == Extent(1, 1)
    assert pool.take_idle(10) is None
    pool.give_back(9)
    assert pool.take_idle(10) is None


def filled(num_blocks: int, *sizes: int) -> BlockPool[int]:
    """Return a pool in which holders 0, 1, ... lie next to each other."""
    pool = BlockPool[int](num_blocks)
    for holder, size in enumerate(sizes):
        assert pool.take(holder, size) == []
    return pool


def test_the_smallest_gap_that_is_large_enough_is_taken() -> None:
    pool = filled(12, 3, 1, 2, 1, 5)
    pool.give_back(0)
    pool.give_back(2)
    assert pool.take(9, 2) == []
    assert pool[9] == Extent(4, 2)


def test_as_few_blocks_as_possible_move_to_make_a_gap() -> None:
    pool = filled(12, 2, 4, 2, 1, 2, 1)
    for holder in (0, 2, 4):
        pool.give_back(holder)
    assert pool.take(9, 4) == [Move(8, 6, 1)]
    assert pool[9] == Extent(7, 4)


def test_an_extent_grows_in_place_if_it_can() -> None:
    pool = filled(12, 2, 2, 2)
    pool.give_back(1)
    assert pool.extend(0, 4) == []
    assert pool[0] == Extent(0, 4)


def test_an_extent_that_can_t_grow_in_place_moves_if_its_neighbours_are_larger() -> None:
    pool = filled(12, 2, 5)
    assert pool.extend(0, 3) == [Move(0, 7, 2)]


def test_neighbours_move_both_ways_where_only_all_free_blocks_suffice() -> None:
    pool = filled(8, 1, 3, 1, 2, 1)
    pool.give_back(0)
    pool.give_back(3)
    assert pool.extend(1, 6) == [Move(1, 0, 3), Move(4, 6, 1)]
    assert pool.num_free == 0


def test_without_enough_free_blocks_nothing_changes() -> None:
    pool = filled(4, 2, 1)
    assert pool.take(9, 2) is None
    assert pool.extend(0, 4) is None
    assert pool.extents == [Extent(0, 2), Extent(2, 1)]
