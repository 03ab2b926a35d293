from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.config import ApiKey
from serve_app.keys.ledger import LEASE_S, KeyLedger, TokenBucket
from tests.serve_app.fakes import FakeClock


class HandClock(FakeClock):
    """A clock that moves only when a test sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.stopwatch_s = 0.0

    def monotonic_s(self) -> float:
        return self.stopwatch_s


@pytest.fixture
def hand() -> HandClock:
    return HandClock()


Open = Callable[..., KeyLedger]


@pytest.fixture
def opened(hand: HandClock) -> Open:
    """Return a function that opens a ledger with one key, "a"."""

    def opened(**limits: int) -> KeyLedger:
        key = ApiKey.model_validate({"name": "a", "sha256": "0" * 64, **limits})
        return KeyLedger([key], hand)

    return opened


async def test_requests_are_counted_and_refill(opened: Open, hand: HandClock) -> None:
    ledger = opened(requests_per_minute=2)
    first, second = await ledger.admit("a", "1"), await ledger.admit("a", "2")
    assert (first.refused_by, second.refused_by) == (None, None)
    assert first.requests is not None
    assert (first.requests.limit, first.requests.remaining) == (2, 1)
    assert first.requests.reset_s == pytest.approx(30)
    third = await ledger.admit("a", "3")
    assert third.refused_by == "requests"
    assert third.retry_after_s == pytest.approx(30)
    hand.stopwatch_s = third.retry_after_s
    assert (await ledger.admit("a", "4")).refused_by is None


async def test_tokens_are_charged_when_they_are_known(opened: Open, hand: HandClock) -> None:
    ledger = opened(tokens_per_minute=60)
    assert (await ledger.admit("a", "1")).refused_by is None
    await ledger.settle("a", "1", 90)
    refused = await ledger.admit("a", "2")
    assert refused.refused_by == "tokens"
    assert refused.tokens is not None
    assert refused.tokens.remaining == 0
    assert refused.requests is None
    hand.stopwatch_s = refused.retry_after_s
    assert (await ledger.admit("a", "3")).refused_by is None


async def test_streams_are_freed_when_they_end(opened: Open) -> None:
    ledger = opened(max_concurrent_streams=2)
    for ticket in ("1", "2"):
        assert (await ledger.admit("a", ticket)).refused_by is None
    assert (await ledger.admit("a", "3")).refused_by == "streams"
    await ledger.settle("a", "1", 0)
    assert (await ledger.admit("a", "3")).refused_by is None
    assert (await ledger.admit("a", "4")).refused_by == "streams"


async def test_a_request_settled_twice_frees_one_stream(opened: Open) -> None:
    ledger = opened(max_concurrent_streams=2)
    for ticket in ("1", "2"):
        await ledger.admit("a", ticket)
    await ledger.settle("a", "1", 0)
    await ledger.settle("a", "1", 0)
    assert (await ledger.admit("a", "3")).refused_by is None
    assert (await ledger.admit("a", "4")).refused_by == "streams"


async def test_a_refused_request_costs_nothing(opened: Open) -> None:
    ledger = opened(requests_per_minute=2, max_concurrent_streams=1)
    await ledger.admit("a", "1")
    assert (await ledger.admit("a", "2")).refused_by == "streams"
    await ledger.settle("a", "1", 0)
    assert (await ledger.admit("a", "3")).refused_by is None


async def test_a_stream_whose_ingress_died_expires(opened: Open, hand: HandClock) -> None:
    ledger = opened(max_concurrent_streams=1)
    await ledger.admit("a", "lost")
    hand.stopwatch_s = LEASE_S - 1
    assert (await ledger.admit("a", "2")).refused_by == "streams"
    hand.stopwatch_s = LEASE_S
    assert (await ledger.admit("a", "3")).refused_by is None


async def test_the_end_of_a_request_whose_key_is_gone_is_ignored(opened: Open) -> None:
    await opened(requests_per_minute=1).settle("gone", "1", 5)


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


def test_an_overdrawn_bucket_must_refill_first() -> None:
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
