from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.token_history import TokenHistory

TOKEN_IDS = st.lists(st.integers(0, 9), max_size=30)


@given(TOKEN_IDS, TOKEN_IDS, st.integers(0, 30))
def test_a_history_that_grew_is_the_history_of_the_whole(
    prompt: list[int], output: list[int], at: int
) -> None:
    history = TokenHistory(prompt, output[:at])
    for token_id in output[at:]:
        history.add(token_id)
    counts = Counter(output)
    found = dict(zip(history.token_ids, history.output_counts, strict=True))
    assert found == {token_id: counts[token_id] for token_id in {*prompt, *output}}
    assert len(history) == len(found)
