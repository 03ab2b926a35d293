import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engine.attention.decode_spans import RowSpan, split_rows


def cost(spans: list[RowSpan], call_cost: float) -> float:
    return sum(call_cost + span.num_read_tokens for span in spans)


def test_rows_of_one_length_are_one_call() -> None:
    assert split_rows(range(32), [512] * 32, 1) == [RowSpan(0, 32, 512)]


def test_nearly_equal_rows_are_one_call() -> None:
    assert split_rows(range(4), [64, 128, 64, 128], 300) == [RowSpan(0, 4, 128)]


def test_one_long_row_among_short_ones_is_a_call_of_its_own() -> None:
    lengths = [64] * 10 + [1024] + [64] * 21
    assert split_rows(range(32), lengths, 300) == [
        RowSpan(0, 10, 64),
        RowSpan(10, 11, 1024),
        RowSpan(11, 32, 64),
    ]


def test_rows_on_both_sides_of_an_unused_slot_are_two_calls() -> None:
    assert split_rows([0, 1, 3], [64, 64, 64], 300) == [RowSpan(0, 2, 64), RowSpan(2, 3, 64)]


def test_alternating_long_and_short_rows_are_one_call_if_many_calls_cost_more() -> None:
    lengths = [1024, 64] * 20
    assert split_rows(range(40), lengths, 500) == [RowSpan(0, 40, 1024)]


def test_no_rows_need_no_call() -> None:
    assert split_rows([], [], 300) == []


@pytest.mark.slow
@settings(max_examples=500)
@given(
    lengths=st.lists(st.integers(1, 16).map(lambda n: 64 * n), min_size=1, max_size=40),
    call_cost=st.integers(0, 5000),
)
def test_every_row_reads_its_length_once_and_a_split_never_costs_more_than_none(
    lengths: list[int], call_cost: int
) -> None:
    spans = split_rows(range(len(lengths)), lengths, call_cost)
    rows = [row for span in spans for row in range(span.first, span.end)]
    assert rows == list(range(len(lengths)))
    for span in spans:
        assert span.read_length == max(lengths[span.first : span.end])
    one_call = RowSpan(0, len(lengths), max(lengths))
    assert cost(spans, call_cost) <= cost([one_call], call_cost)
