import asyncio

import pytest

from loadtest.client.watchdog import TimeLimits, Watchdog
from loadtest.results.record import ErrorKind
from tests.stopped_clock import Clock, settle

LONG = 3600.0


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        (TimeLimits(total_s=0.0, first_token_s=LONG, stall_s=LONG), ErrorKind.TIMEOUT_TOTAL),
        (TimeLimits(total_s=LONG, first_token_s=0.0, stall_s=LONG), ErrorKind.TIMEOUT_FIRST),
    ],
)
async def test_the_expired_limit_is_named(limits: TimeLimits, kind: ErrorKind) -> None:
    watchdog = Watchdog(limits)
    with pytest.raises(TimeoutError):
        async with watchdog:
            await asyncio.Event().wait()
    assert watchdog.expired is kind


async def test_a_stall_counts_from_the_last_content_even_if_its_limit_is_shortest() -> None:
    watchdog = Watchdog(TimeLimits(total_s=LONG, first_token_s=LONG, stall_s=0.01))

    async def stalled() -> None:
        async with watchdog:
            watchdog.content_came()
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await stalled()
    assert watchdog.expired is ErrorKind.TIMEOUT_STALL


async def test_content_in_time_prevents_a_stall(advance: Clock) -> None:
    watchdog = Watchdog(TimeLimits(first_token_s=LONG, stall_s=1.0))
    async with watchdog:
        for _ in range(3):
            watchdog.content_came()
            advance(0.9)
            await settle()
    assert watchdog.expired is None


async def test_a_disarmed_watchdog_has_no_limits(advance: Clock) -> None:
    watchdog = Watchdog(TimeLimits(total_s=1.0))
    async with watchdog:
        watchdog.disarm()
        advance(LONG)
        await settle()
    assert watchdog.expired is None


async def test_without_limits_a_cancellation_passes_through() -> None:
    watchdog = Watchdog(TimeLimits())

    async def guarded() -> None:
        async with watchdog:
            await asyncio.Event().wait()

    waiting = asyncio.ensure_future(guarded())
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert watchdog.expired is None
