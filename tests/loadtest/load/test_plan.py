import random
from itertools import islice, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadtest.load.arrivals import arrivals_s


def times(rate: float, num: int, *, ramp_s: float = 0.0, seed: int | None = None) -> list[float]:
    rng = random.Random(seed)
    due_s = arrivals_s(rate, rng, is_poisson=seed is not None, ramp_s=ramp_s)
    return list(islice(due_s, num))


def test_a_constant_rate_is_evenly_spaced_from_the_start() -> None:
    assert times(4, 4) == [0, 0.25, 0.5, 0.75]


def test_a_ramp_reaches_the_rate_and_holds_it() -> None:
    due_s = times(10, 200, ramp_s=10)
    assert sum(time_s < 10 for time_s in due_s) == 50
    assert [b - a for a, b in pairwise(due_s[60:])] == pytest.approx([0.1] * 139)


def test_poisson_gaps_have_the_rate_s_mean_and_spread_and_a_seed_repeats_them() -> None:
    due_s = times(50, 20_000, seed=1)
    gaps = [b - a for a, b in pairwise(due_s)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.03)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.05)
    assert due_s == times(50, 20_000, seed=1)


@example(1.0, 5e-324, None, 1)
@given(st.floats(0.01, 1e4), st.floats(0, 100), st.none() | st.integers(0, 5), st.integers(1, 300))
def test_times_never_go_back(rate: float, ramp_s: float, seed: int | None, num: int) -> None:
    due_s = times(rate, num, ramp_s=ramp_s, seed=seed)
    assert due_s == sorted(due_s)
    assert due_s[0] == 0
