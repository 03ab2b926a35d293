import random
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from models.training.corpus import load_corpus
from models.training.made_up_names import Kind, MadeUpNames, is_held_out

REAL_NAMES = frozenset(entry.name for entry in load_corpus())
NAMES = MadeUpNames(REAL_NAMES)


@given(seed=st.integers(0, 2**32))
def test_a_made_up_name_is_never_in_the_corpus(seed: int) -> None:
    names = islice(NAMES.for_training(random.Random(seed)), 20)
    assert REAL_NAMES.isdisjoint(names)


@given(seed=st.integers(0, 2**32))
def test_training_and_evaluation_share_no_name(seed: int) -> None:
    assert not any(map(is_held_out, islice(NAMES.for_training(random.Random(seed)), 20)))
    assert all(is_held_out(name) for _, name in NAMES.for_evaluation(5, seed))


def test_the_same_seed_gives_the_same_names_whatever_the_order_of_the_corpus() -> None:
    shuffled = MadeUpNames(sorted(REAL_NAMES, key=len))
    assert NAMES.for_evaluation(50, seed=3) == shuffled.for_evaluation(50, seed=3)
    assert NAMES.for_evaluation(50, seed=3) != NAMES.for_evaluation(50, seed=4)


def test_names_for_evaluation_are_distinct_and_of_every_kind() -> None:
    drawn = NAMES.for_evaluation(200, seed=1)
    assert len({name for _, name in drawn}) == 200
    assert {kind for kind, _ in drawn} == set(Kind)
