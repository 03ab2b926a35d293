from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.scheduling.token_counts import TokenCounts

TOKEN_IDS = st.lists(st.integers(0, 9), max_size=30)


@given(TOKEN_IDS, TOKEN_IDS, st.integers(0, 30))
def test_counts_that_grew_equal_counts_of_the_whole(
    prompt: list[int], output: list[int], at: int
) -> None:
    grown = TokenCounts(prompt, output[:at])
    for token_id in output[at:]:
        grown.add(token_id)
    expected = Counter(output)
    found = dict(zip(grown.token_ids, grown.output_counts, strict=True))
    assert found == {token_id: expected[token_id] for token_id in {*prompt, *output}}
    assert len(grown) == len(found)
