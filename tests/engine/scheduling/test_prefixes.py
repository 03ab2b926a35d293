from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.scheduling.prefixes import num_shared_tokens


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_shared_tokens_are_counted_to_the_first_that_differs(
    first: list[int], second: list[int]
) -> None:
    limit = min(len(first), len(second))
    expected = next((i for i in range(limit) if first[i] != second[i]), limit)
    assert num_shared_tokens(first, second, limit) == expected
    # A bisection could go wrong inside long runs of equal tokens.
    long_first, long_second = [7] * 100 + first, [7] * 100 + second
    assert num_shared_tokens(long_first, long_second, 100 + limit) == 100 + expected
