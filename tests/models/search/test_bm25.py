from hypothesis import given
from hypothesis import strategies as st

from models.training.search.bm25 import Bm25, terms

TEXTS = ("class collections.OrderedDict", "function os.path.join", "the the the the the")


def test_names_and_inflections_become_the_same_terms() -> None:
    assert terms("collections.OrderedDict") == terms("collection ordering DICT")


def test_rare_terms_count_more_than_common_ones() -> None:
    texts = [*("the function" for _ in range(9)), "the join"]
    assert Bm25(texts).best("the join", 1) == [9]


def test_a_text_that_shares_no_term_is_not_ranked() -> None:
    assert Bm25(TEXTS).best("ordered dict", 3) == [0]
    assert Bm25(TEXTS).best("nothing of this", 3) == []


@given(
    st.lists(st.text(alphabet="abc ", min_size=1), min_size=1, max_size=6),
    st.text("abc ", max_size=9),
)
def test_the_best_are_distinct_and_share_a_term(texts: list[str], question: str) -> None:
    best = Bm25([*texts, "some other text"]).best(question, 3)
    assert len(set(best)) == len(best) <= 3
    assert all(set(terms(texts[index])) & set(terms(question)) for index in best)
