import random
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadtest.config.run_config import RunConfig
from loadtest.load.plan import arrivals_s, plans_of

URL = "http://127.0.0.1:8000/v1/chat/completions"


def configured(**settings: Any) -> RunConfig:
    return RunConfig.model_validate({"url": URL, **settings})


def times(rate: float, num: int, *, ramp_s: float = 0.0, seed: int | None = None) -> list[float]:
    rng = random.Random(seed)
    due_s = arrivals_s(rate, rng, is_poisson=seed is not None, ramp_s=ramp_s)
    return list(islice(due_s, num))


def test_a_constant_rate_is_evenly_spaced_from_the_start() -> None:
    assert times(4, 4) == [0, 0.25, 0.5, 0.75]


def test_a_ramp_rises_to_the_rate_and_holds_it() -> None:
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
def test_arrival_times_never_decrease(
    rate: float, ramp_s: float, seed: int | None, num: int
) -> None:
    due_s = times(rate, num, ramp_s=ramp_s, seed=seed)
    assert due_s == sorted(due_s)
    assert due_s[0] == 0


def test_the_default_is_five_queues_of_twenty_loops_after_a_warm_up() -> None:
    [plan] = plans_of(configured())
    assert (plan.num_queues, plan.num_loops, plan.num_warmups) == (5, 20, 1)
    assert plan.num_counted == 100
    assert plan.title == "5 queues"


def test_a_rate_without_a_limit_sends_a_hundred_requests() -> None:
    [plan] = plans_of(configured(rate=2.5))
    assert (plan.num_queues, plan.num_loops, plan.num_requests) == (None, None, 100)
    assert plan.title == "2.5 requests/s"


def test_a_sweep_is_repeated_as_a_whole() -> None:
    plans = plans_of(configured(queues="1,8", repeat=2, duration="5s"))
    assert [(plan.index, plan.repeat, plan.num_queues) for plan in plans] == [
        (0, 0, 1),
        (1, 0, 8),
        (2, 1, 1),
        (3, 1, 8),
    ]
    assert {plan.num_loops for plan in plans} == {None}
