from math import ceil, log2

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.isolation import Blame, Isolation


class Runs:
    """Runs items, but not together with all of a bad combination."""

    def __init__(self, *bad: set[int]) -> None:
        self.bad = bad
        self.attempts: list[tuple[int, ...]] = []

    def __call__(self, items: tuple[int, ...]) -> list[int]:
        self.attempts.append(items)
        if any(combination <= set(items) for combination in self.bad):
            raise ValueError("these don't go together")
        return [-item for item in items]


def isolate(runs: Runs, num_items: int) -> Isolation[int, list[int]]:
    isolation = Isolation("the test", runs)
    isolation.run(range(num_items))
    return isolation


def ran(isolation: Isolation[int, list[int]]) -> list[int]:
    for items, result in isolation.ran:
        assert result == [-item for item in items]
    return sorted(item for items, _ in isolation.ran for item in items)


def test_what_passes_runs_once_and_together() -> None:
    runs = Runs()
    assert ran(isolate(runs, 5)) == [0, 1, 2, 3, 4]
    assert runs.attempts == [(0, 1, 2, 3, 4)]


@pytest.mark.parametrize("bad", range(64))
def test_one_bad_item_among_64_is_found_within_eight_more_runs(bad: int) -> None:
    runs = Runs({bad})
    isolation = isolate(runs, 64)
    assert isolation.blamed == [Blame(bad, is_out_of_memory=False)]
    assert ran(isolation) == sorted(set(range(64)) - {bad})
    assert len(runs.attempts) <= 1 + 6 + 2


@given(num_items=st.integers(1, 40), bad=st.sets(st.integers(0, 39), max_size=6))
def test_each_bad_item_is_blamed_and_each_other_runs_once(num_items: int, bad: set[int]) -> None:
    runs = Runs(*({item} for item in bad))
    isolation = isolate(runs, num_items)
    bad &= set(range(num_items))
    assert sorted(blame.item for blame in isolation.blamed) == sorted(bad)
    assert ran(isolation) == sorted(set(range(num_items)) - bad)
    assert len(runs.attempts) <= (len(bad) + 1) * (ceil(log2(num_items)) + 2)


@given(
    num_items=st.integers(2, 40),
    bad=st.lists(st.sets(st.integers(0, 39), min_size=2, max_size=4), min_size=1, max_size=4),
)
def test_an_error_that_needs_several_together_blames_none(
    num_items: int, bad: list[set[int]]
) -> None:
    isolation = isolate(Runs(*bad), num_items)
    assert isolation.blamed == []
    assert ran(isolation) == list(range(num_items))


def test_a_want_of_memory_is_told_apart() -> None:
    def run(items: tuple[int, ...]) -> None:
        if 1 in items:
            raise torch.OutOfMemoryError("CUDA out of memory")

    isolation = Isolation("the test", run)
    isolation.run(range(3))
    assert isolation.blamed == [Blame(1, is_out_of_memory=True)]


def test_a_device_that_is_gone_blames_none() -> None:
    def run(items: tuple[int, ...]) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    isolation = Isolation("the test", run)
    with pytest.raises(torch.AcceleratorError):
        isolation.run(range(3))
    assert isolation.blamed == []
