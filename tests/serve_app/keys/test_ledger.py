from collections.abc import Callable

import pytest

from serve_app.api_keys import ApiKey
from serve_app.key_ledger import LEASE_S, KeyLedger
from tests.serve_app.fakes import FakeClock


class HandClock(FakeClock):
    """Stands still until it is moved."""

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


async def test_requests_are_counted_and_come_back(opened: Open, hand: HandClock) -> None:
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


async def test_an_end_that_is_told_twice_frees_once(opened: Open) -> None:
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


async def test_a_stream_whose_ingress_died_is_forgotten_in_the_end(
    opened: Open, hand: HandClock
) -> None:
    ledger = opened(max_concurrent_streams=1)
    await ledger.admit("a", "lost")
    hand.stopwatch_s = LEASE_S - 1
    assert (await ledger.admit("a", "2")).refused_by == "streams"
    hand.stopwatch_s = LEASE_S
    assert (await ledger.admit("a", "3")).refused_by is None


async def test_the_end_of_a_request_whose_key_is_gone_is_nobodys(opened: Open) -> None:
    await opened(requests_per_minute=1).settle("gone", "1", 5)
