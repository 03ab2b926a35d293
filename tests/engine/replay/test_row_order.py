from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.replay.row_order import RowOrder

SPARE = (1000, 2000)


def test_rows_run_in_the_order_of_their_extents_and_padding_follows() -> None:
    order = RowOrder.of([(64, 0), (8, 32), (24, 16)], 4, SPARE)
    assert order.inputs == [2, 0, 1, 3, 8, 24, 64, 1000, 32, 16, 0, 2000]
    assert order.sort([7, 8, 9]) == [8, 9, 7, 0]


def test_an_order_holds_for_the_same_extents_and_size_only() -> None:
    order = RowOrder.of([(64, 0), (8, 32)], 2, SPARE)
    assert order.holds([(64, 0), (8, 32)], 2)
    assert not order.holds([(64, 0), (8, 32)], 4)
    assert not order.holds([(8, 32), (64, 0)], 2)
    assert not order.holds([(64, 0)], 2)


@given(st.permutations(range(7)), st.integers(0, 3))
def test_the_places_undo_the_order(firsts: list[int], num_padding: int) -> None:
    num_rows = len(firsts) + num_padding
    order = RowOrder.of([(first, 0) for first in firsts], num_rows, SPARE)
    places, starts = order.inputs[:num_rows], order.inputs[num_rows : 2 * num_rows]
    assert sorted(places) == list(range(num_rows))
    assert starts == sorted(starts)
    assert order.sort(firsts) == [*sorted(firsts), *[0] * num_padding]
    assert [starts[place] for place in places[: len(firsts)]] == firsts
