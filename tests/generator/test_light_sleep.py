import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from deployments.contract.errors import ReplicaUnavailableError
from deployments.generator.light_sleep import LightSleeper
from deployments.plan.replica_report import LightSleep, SleepState
from tests.deadline import until

pytestmark = pytest.mark.in_time

AFTER_S = 0.001


class HandEngine:
    """An engine that sleeps and wakes when the test lets it."""

    def __init__(self) -> None:
        self.may_sleep, self.may_wake = asyncio.Event(), asyncio.Event()
        self.may_sleep.set()
        self.may_wake.set()
        self.is_busy = False
        self.error: Exception | None = None
        self.calls: list[str] = []

    async def sleep(self) -> bool:
        self.calls.append("sleep")
        await self.may_sleep.wait()
        return not self.is_busy

    async def wake(self) -> None:
        self.calls.append("wake")
        await self.may_wake.wait()
        if self.error is not None:
            raise self.error


class Watched:
    """A sleeper whose states can be waited for."""

    def __init__(self, after_s: float | None = AFTER_S) -> None:
        self.engine = HandEngine()
        self.memory = iter((1000, 100, 1100, 110))
        self.reports: list[LightSleep] = []
        self.told: list[float] = []
        self.is_kept_awake = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_asked = 0
        self.sleeper = LightSleeper(
            self.engine, after_s, lambda: next(self.memory), self.reports.append, self.ask, 0.001
        )

    async def ask(self) -> bool:
        """Return whether it is kept awake, once that may be answered."""
        self.num_asked += 1
        await self.may_answer.wait()
        return self.is_kept_awake

    async def reach(self, state: SleepState) -> None:
        await until(lambda: self.sleeper.state is state)

    async def use(self) -> list[float]:
        """Use the engine once, and return what was told of waiting for it."""
        with self.sleeper.in_use():
            told = list[float]()
            async for waited_s in self.sleeper.waking():
                told.append(waited_s)
                self.told.append(waited_s)
            return told

    async def use_until(self, may_end: asyncio.Event) -> None:
        """Use the engine until an event."""
        with self.sleeper.in_use():
            async for _ in self.sleeper.waking():
                pass
            await may_end.wait()


@asynccontextmanager
async def asleep() -> AsyncIterator[Watched]:
    watched = Watched()
    watched.sleeper.watch()
    await watched.reach(SleepState.ASLEEP)
    yield watched
    watched.sleeper.close()


async def test_it_never_sleeps_unless_told_to() -> None:
    watched = Watched(None)
    await watched.use()
    watched.sleeper.watch()
    assert watched.sleeper._timer is None
    assert watched.engine.calls == []


async def test_it_sleeps_after_its_last_use_and_says_what_that_gave() -> None:
    watched = Watched()
    with watched.sleeper.in_use():
        with watched.sleeper.in_use():
            pass
        watched.sleeper.watch()
        assert watched.sleeper._timer is None
    await watched.reach(SleepState.ASLEEP)
    report = watched.reports[-1]
    assert (report.num_sleeps, report.awake_bytes, report.asleep_bytes) == (1, 1000, 100)
    assert report.last_wake_s is None


async def test_an_engine_that_still_runs_something_is_asked_again() -> None:
    watched = Watched()
    watched.memory = iter(range(10_000))
    watched.engine.is_busy = True
    watched.sleeper.watch()
    await until(lambda: watched.engine.calls.count("sleep") >= 3)
    assert watched.sleeper.report.num_sleeps == 0
    watched.engine.is_busy = False
    await watched.reach(SleepState.ASLEEP)


async def test_an_engine_that_is_kept_awake_sleeps_once_it_no_longer_is() -> None:
    watched = Watched()
    watched.is_kept_awake = True
    watched.sleeper.watch()
    await until(lambda: watched.num_asked >= 3)
    assert (watched.engine.calls, watched.reports) == ([], [])
    watched.is_kept_awake = False
    await watched.reach(SleepState.ASLEEP)
    assert watched.engine.calls == ["sleep"]


async def test_a_request_that_comes_while_it_is_asked_finds_the_engine_awake() -> None:
    watched = Watched()
    watched.may_answer.clear()
    watched.sleeper.watch()
    await until(lambda: watched.num_asked == 1)
    with watched.sleeper.in_use():
        assert [told async for told in watched.sleeper.waking()] == []
        watched.may_answer.set()
        await until(lambda: watched.sleeper._change is None)
        assert watched.engine.calls == []
    await watched.reach(SleepState.ASLEEP)


async def test_who_looks_in_while_it_is_asked_lets_it_fall_asleep_only_once() -> None:
    watched = Watched(3600)
    watched.may_answer.clear()
    watched.sleeper._look()
    await until(lambda: watched.num_asked == 1)
    watched.sleeper.watch()  # a health check
    await watched.use()
    watched.may_answer.set()
    await watched.reach(SleepState.ASLEEP)
    assert watched.sleeper._timer is None


async def test_one_that_is_closed_while_it_is_asked_stays_awake() -> None:
    watched = Watched()
    watched.may_answer.clear()
    watched.sleeper.watch()
    await until(lambda: watched.num_asked == 1)
    watched.sleeper.close()
    watched.may_answer.set()
    await until(lambda: watched.sleeper._change is None)
    assert (watched.engine.calls, watched.sleeper._timer) == ([], None)


async def test_all_that_come_wait_for_one_wake() -> None:
    async with asleep() as watched:
        watched.engine.may_wake.clear()
        using = [asyncio.ensure_future(watched.use()) for _ in range(5)]
        await watched.reach(SleepState.WAKING)
        await until(lambda: len(watched.told) >= 50)
        watched.engine.may_wake.set()
        told = await asyncio.gather(*using)
        assert watched.engine.calls == ["sleep", "wake"]
        assert sum(map(len, told)) == len(watched.told)
        assert any(told)
        assert watched.sleeper.report.last_wake_s is not None


async def test_who_comes_while_it_falls_asleep_waits_for_both() -> None:
    watched = Watched()
    watched.engine.may_sleep.clear()
    watched.sleeper.watch()
    await watched.reach(SleepState.FALLING_ASLEEP)
    using = asyncio.ensure_future(watched.use())
    await until(lambda: watched.told)
    assert watched.engine.calls == ["sleep"]
    watched.engine.may_sleep.set()
    await using
    assert watched.engine.calls[:2] == ["sleep", "wake"]
    watched.sleeper.close()


async def test_one_that_comes_just_before_it_falls_asleep_keeps_it_awake() -> None:
    watched = Watched()
    watched.sleeper.watch()
    using = asyncio.ensure_future(watched.use_until(may_end := asyncio.Event()))
    watched.sleeper._look()  # as if the time were over; the use begins before the sleep does
    await until(lambda: watched.sleeper._num_users)
    await until(lambda: watched.sleeper._change is None)
    assert watched.engine.calls == []
    may_end.set()
    await using
    await watched.reach(SleepState.ASLEEP)


async def test_one_that_is_cancelled_leaves_the_others_their_wake() -> None:
    async with asleep() as watched:
        watched.engine.may_wake.clear()
        gone, stays = (asyncio.ensure_future(watched.use()) for _ in range(2))
        await watched.reach(SleepState.WAKING)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert watched.sleeper._num_users == 1
        watched.engine.may_wake.set()
        await stays
        assert watched.engine.calls == ["sleep", "wake"]


async def test_it_sleeps_again_if_all_that_woke_it_are_gone() -> None:
    async with asleep() as watched:
        watched.engine.may_wake.clear()
        gone = asyncio.ensure_future(watched.use())
        await watched.reach(SleepState.WAKING)
        gone.cancel()
        await asyncio.wait([gone])
        watched.engine.may_wake.set()
        await until(lambda: watched.engine.calls == ["sleep", "wake", "sleep"])
        await watched.reach(SleepState.ASLEEP)


async def test_a_wake_that_fails_is_told_to_all_that_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with asleep() as watched:
        watched.engine.error = ReplicaUnavailableError("the files are gone")
        results = await asyncio.gather(*(watched.use() for _ in range(3)), return_exceptions=True)
        assert [str(each) for each in results] == ["the files are gone"] * 3
        assert watched.sleeper.state is SleepState.ASLEEP
        assert watched.engine.calls == ["sleep", "wake"]
    assert "the files are gone" in caplog.text


async def test_it_falls_asleep_no_more_once_it_is_closed() -> None:
    watched = Watched()
    watched.sleeper.watch()
    watched.sleeper.close()
    watched.sleeper.watch()
    assert watched.sleeper._timer is None
