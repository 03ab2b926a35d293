from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.token_credit import credit, spread
from loadtest.results.record import TokenSource


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_spreading_keeps_the_sum_and_counts_the_first_event_as_one(
    num_tokens: int, num_events: int
) -> None:
    tokens = spread(num_tokens, num_events)
    assert len(tokens) == num_events
    assert sum(tokens) == num_tokens
    assert min(tokens) >= 0
    if num_events > 1:
        assert tokens[0] == min(1, num_tokens)
        assert max(tokens[1:]) - min(tokens[1:]) <= 1


@given(st.lists(st.integers(0, 20), min_size=1), st.integers(0, 5))
def test_usage_so_far_gives_each_event_its_tokens_and_the_last_one_the_rest(
    tokens: list[int], num_behind: int
) -> None:
    so_far = [sum(tokens[: end + 1]) for end in range(len(tokens))]
    credited = credit(sum(tokens) + num_behind, so_far, [None] * len(tokens))
    assert credited.tokens == (*tokens[:-1], tokens[-1] + num_behind)
    assert credited.source is TokenSource.USAGE


def test_usage_is_preferred_to_events_and_events_to_chunks() -> None:
    assert credit(7, [None] * 3, [2, 2, 2]).tokens == (1, 3, 3)
    assert credit(None, [None] * 3, [2, 2, 3]).tokens == (2, 2, 3)
    assert credit(None, [None] * 3, [2, 2, 3]).source is TokenSource.EVENTS
    assert credit(None, [None] * 3, [2, None, 3]).tokens == (1, 1, 1)
    assert credit(None, [None] * 3, [2, None, 3]).source is TokenSource.CHUNKS


def test_a_decreasing_usage_is_not_used_per_event() -> None:
    assert credit(6, [4, 2, 6], [None] * 3).tokens == (1, 2, 3)


def test_a_single_event_has_all_tokens() -> None:
    assert credit(5, [None], [None]).tokens == (5,)
    assert credit(5, [], []).tokens == ()
