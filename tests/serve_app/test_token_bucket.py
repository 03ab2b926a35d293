import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.token_bucket import TokenBucket


def test_a_minutes_worth_may_be_used_at_once() -> None:
    bucket = TokenBucket(3, now_s=0)
    for _ in range(3):
        assert bucket.wait_s(0) == 0
        bucket.take(1, 0)
    assert bucket.wait_s(0) == pytest.approx(20)


def test_it_refills_steadily_and_not_beyond_its_limit() -> None:
    bucket = TokenBucket(60, now_s=0)
    bucket.take(60, 0)
    assert bucket.level(7) == pytest.approx(7)
    assert bucket.full_s(7) == pytest.approx(53)
    assert bucket.level(1000) == 60
    assert bucket.full_s(1000) == 0


def test_what_was_overdrawn_is_waited_for() -> None:
    bucket = TokenBucket(60, now_s=0)
    bucket.take(180, 0)
    assert bucket.wait_s(0) == pytest.approx(121)
    assert bucket.wait_s(121) == pytest.approx(0)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=60))
def test_no_more_than_the_limit_passes_in_the_long_run(steps: list[tuple[float, int]]) -> None:
    bucket, now_s, taken, largest = TokenBucket(60, 0), 0.0, 0, 0
    for pause_s, amount in steps:
        now_s += pause_s
        if bucket.wait_s(now_s) == 0:
            bucket.take(amount, now_s)
            taken += amount
            largest = max(largest, amount)
    assert taken <= 60 + now_s + largest
