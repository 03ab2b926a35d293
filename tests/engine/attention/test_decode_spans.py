import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engine.attention.decode_spans import RowSpan, split_rows

ANY = float("inf")


def cost(spans: list[RowSpan], call_cost: float) -> float:
    return sum(call_cost + span.cost for span in spans)


def test_short_rows_share_a_call() -> None:
    assert split_rows([64] * 32, 1000, ANY) == [RowSpan(0, 32, 64)]


def test_nearly_equal_rows_share_a_call() -> None:
    assert split_rows([64, 128, 64, 128], 1000, ANY) == [RowSpan(0, 4, 128)]


def test_long_rows_are_calls_of_their_own_since_gathering_costs_more() -> None:
    assert split_rows([512] * 3, 300, ANY) == [RowSpan(i, i + 1, 512) for i in range(3)]


def test_one_long_row_among_short_ones_is_a_call_of_its_own() -> None:
    lengths = [64] * 10 + [1024] + [64] * 21
    assert split_rows(lengths, 1000, ANY) == [
        RowSpan(0, 10, 64),
        RowSpan(10, 11, 1024),
        RowSpan(11, 32, 64),
    ]


def test_alternating_long_and_short_rows_share_a_call_if_many_calls_cost_more() -> None:
    lengths = [1024, 64] * 20
    assert split_rows(lengths, 2600, ANY) == [RowSpan(0, 40, 1024)]


def test_no_more_tokens_than_allowed_are_gathered_for_a_call() -> None:
    assert split_rows([64] * 5, 1000, 128) == [
        RowSpan(0, 2, 64),
        RowSpan(2, 4, 64),
        RowSpan(4, 5, 64),
    ]


def test_a_row_that_is_not_gathered_may_be_longer_than_that() -> None:
    assert split_rows([512], 1000, 128) == [RowSpan(0, 1, 512)]


def test_no_rows_need_no_call() -> None:
    assert split_rows([], 300, ANY) == []


@pytest.mark.slow
@settings(max_examples=500)
@given(
    lengths=st.lists(st.integers(1, 16).map(lambda n: 64 * n), min_size=1, max_size=40),
    call_cost=st.integers(0, 5000),
    max_gathered=st.integers(0, 20_000),
)
def test_every_row_reads_its_length_once_and_a_split_never_costs_more_than_one_call(
    lengths: list[int], call_cost: int, max_gathered: int
) -> None:
    spans = split_rows(lengths, call_cost, max_gathered)
    rows = [row for span in spans for row in range(span.first, span.end)]
    assert rows == list(range(len(lengths)))
    for span in spans:
        assert span.read_length == max(lengths[span.first : span.end])
        assert span.end - span.first == 1 or span.num_read_tokens <= max_gathered
    one_call = RowSpan(0, len(lengths), max(lengths))
    if one_call.num_read_tokens <= max_gathered:
        assert cost(spans, call_cost) <= cost([one_call], call_cost)
