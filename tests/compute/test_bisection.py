from math import ceil, log2

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.compute.bisection import Bisection, Failure
from tests.failing import failing


class Runs:
    """Runs items, and fails if a batch contains a bad combination."""

    def __init__(self, *bad: set[int]) -> None:
        self.bad = bad
        self.attempts: list[tuple[int, ...]] = []

    def __call__(self, items: tuple[int, ...]) -> list[int]:
        self.attempts.append(items)
        if any(combination <= set(items) for combination in self.bad):
            raise ValueError("these don't go together")
        return [-item for item in items]


def isolate(runs: Runs, num_items: int) -> Bisection[int, list[int]]:
    bisection = Bisection("the test", runs)
    bisection.run(range(num_items))
    return bisection


def ran(bisection: Bisection[int, list[int]]) -> list[int]:
    for items, result in bisection.ran:
        assert result == [-item for item in items]
    return sorted(item for items, _ in bisection.ran for item in items)


def test_items_that_pass_run_once_and_together() -> None:
    runs = Runs()
    assert ran(isolate(runs, 5)) == [0, 1, 2, 3, 4]
    assert runs.attempts == [(0, 1, 2, 3, 4)]


def test_one_bad_item_among_64_is_found_within_eight_more_runs() -> None:
    offenders = []
    for bad in range(64):
        runs = Runs({bad})
        bisection = isolate(runs, 64)
        is_found = bisection.failures == [Failure(bad, is_out_of_memory=False)]
        others = sorted(set(range(64)) - {bad})
        if not is_found or ran(bisection) != others or len(runs.attempts) > 1 + 6 + 2:
            offenders.append((bad, bisection.failures, len(runs.attempts)))
    assert offenders == []


@given(num_items=st.integers(1, 40), bad=st.sets(st.integers(0, 39), max_size=6))
def test_each_bad_item_fails_and_each_other_runs_once(num_items: int, bad: set[int]) -> None:
    runs = Runs(*({item} for item in bad))
    bisection = isolate(runs, num_items)
    bad &= set(range(num_items))
    assert sorted(failure.item for failure in bisection.failures) == sorted(bad)
    assert ran(bisection) == sorted(set(range(num_items)) - bad)
    assert len(runs.attempts) <= (len(bad) + 1) * (ceil(log2(num_items)) + 2)


@given(
    num_items=st.integers(2, 40),
    bad=st.lists(st.sets(st.integers(0, 39), min_size=2, max_size=4), min_size=1, max_size=4),
)
def test_an_error_that_needs_several_items_fails_none_of_them(
    num_items: int, bad: list[set[int]]
) -> None:
    bisection = isolate(Runs(*bad), num_items)
    assert bisection.failures == []
    assert ran(bisection) == list(range(num_items))


def test_out_of_memory_is_told_apart() -> None:
    def run(items: tuple[int, ...]) -> None:
        if 1 in items:
            raise torch.OutOfMemoryError("CUDA out of memory")

    bisection = Bisection("the test", run)
    bisection.run(range(3))
    assert bisection.failures == [Failure(1, is_out_of_memory=True)]


def test_a_lost_device_fails_no_item() -> None:
    bisection = Bisection(
        "the test", failing(torch.AcceleratorError("CUDA error: device-side assert triggered"))
    )
    with pytest.raises(torch.AcceleratorError):
        bisection.run(range(3))
    assert bisection.failures == []
