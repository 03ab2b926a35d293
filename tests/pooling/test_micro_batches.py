from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deployments.pooling.micro_batches import MAX_LAID_OUT, RoundRobin, in_order, take_batch


@dataclass(frozen=True)
class Item:
    number: int
    num_tokens: int


items = st.lists(st.integers(1, 50), min_size=1, max_size=60).map(
    lambda lengths: [Item(i, n) for i, n in enumerate(lengths)]
)


def batches(taken: list[Item], max_tokens: int, *, is_padded: bool) -> list[list[Item]]:
    waiting, found = deque(in_order(taken, is_padded=is_padded)), []
    while batch := take_batch([waiting], max_tokens, is_padded=is_padded, is_wanted=lambda _: True):
        found.append(batch)
    return found


def tokens(taken: list[Item]) -> int:
    return sum(item.num_tokens for item in taken)


def cost(batch: list[Item], *, is_padded: bool) -> float:
    lengths = [item.num_tokens for item in batch]
    num_padded = max(lengths) * len(lengths)
    return num_padded if is_padded else max(sum(lengths), num_padded / MAX_LAID_OUT)


@given(taken=items, max_tokens=st.integers(1, 100), is_padded=st.booleans())
def test_every_text_runs_once_and_batches_are_as_large_as_the_limit_allows(
    taken: list[Item], max_tokens: int, is_padded: bool
) -> None:
    found = batches(taken, max_tokens, is_padded=is_padded)
    assert sorted(item.number for batch in found for item in batch) == list(range(len(taken)))
    for batch in found:
        assert len(batch) == 1 or cost(batch, is_padded=is_padded) <= max_tokens
    for batch, following in pairwise(found):
        assert cost([*batch, following[0]], is_padded=is_padded) > max_tokens


@given(taken=items, max_tokens=st.integers(1, 100), unwanted=st.sets(st.integers(0, 59)))
def test_unwanted_texts_are_dropped_and_each_text_is_checked_about_once(
    taken: list[Item], max_tokens: int, unwanted: set[int]
) -> None:
    checks: list[int] = []

    def is_wanted(item: Item) -> bool:
        checks.append(item.number)
        return item.number not in unwanted

    waiting, found = deque(taken), []
    while batch := take_batch([waiting], max_tokens, is_padded=False, is_wanted=is_wanted):
        found.append(batch)
    wanted = [item for item in taken if item.number not in unwanted]
    assert found == batches(wanted, max_tokens, is_padded=False)
    # Each is checked once, and the first of a batch once more: it did not fit the batch before.
    assert len(checks) <= len(taken) + len(found)


def test_a_long_text_is_packed_with_few_short_ones_so_that_its_layout_stays_small() -> None:
    taken = [Item(0, 1024), *(Item(i, 3) for i in range(1, 342))]
    found = batches(taken, 2048, is_padded=False)
    assert [len(batch) for batch in found] == [16, 326]


@given(taken=items, max_tokens=st.integers(1, 100))
def test_packed_texts_run_in_order_of_arrival(taken: list[Item], max_tokens: int) -> None:
    found = batches(taken, max_tokens, is_padded=False)
    assert [item.number for batch in found for item in batch] == list(range(len(taken)))


@given(taken=items, max_tokens=st.integers(1, 100))
def test_padded_texts_run_sorted_by_length(taken: list[Item], max_tokens: int) -> None:
    found = batches(taken, max_tokens, is_padded=True)
    lengths = [item.num_tokens for batch in found for item in batch]
    assert lengths == sorted(lengths)


@given(
    requests=st.lists(items, min_size=1, max_size=8),
    max_tokens=st.integers(1, 100),
    min_tokens=st.integers(1, 300),
    num_more=st.integers(0, 300),
)
def test_requests_take_turns_and_each_of_their_texts_has_one(
    requests: list[list[Item]], max_tokens: int, min_tokens: int, num_more: int
) -> None:
    turns, waiting = RoundRobin[Item](max_tokens), [deque(each) for each in requests]
    for each in waiting:
        turns.add(each)
    while turns:
        wanted = min_tokens + num_more
        taken = deque(turns.take(min_tokens, wanted, lambda _: True))
        assert taken
        total, num_waiting = 0, len(list(filter(None, waiting)))
        while taken:
            # Of each request in order: one text, and more only as far as they fit.
            assert total < wanted
            for each in filter(None, waiting):
                turn = [each.popleft()]
                while each and tokens([*turn, each[0]]) <= max_tokens:
                    turn.append(each.popleft())
                assert [taken.popleft() for _ in turn] == turn
                total += tokens(turn)
            if len(list(filter(None, waiting))) < num_waiting:
                wanted = min_tokens
        assert total >= wanted or not any(waiting)
    assert not any(waiting)
