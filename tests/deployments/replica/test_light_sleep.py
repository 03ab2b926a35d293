import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from deployments.contract.errors import ReplicaUnavailableError
from deployments.plan.replica_report import LightSleep, SleepState
from deployments.replica import light_sleep
from deployments.replica.light_sleep import LightSleeper, Turn, TurnEnd
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

    def __init__(
        self,
        after_s: float | None = AFTER_S,
        turn: Turn | None = None,
        turn_end: TurnEnd | None = None,
    ) -> None:
        self.engine = HandEngine()
        self.memory = iter((1000, 100, 1100, 110))
        self.reports: list[LightSleep] = []
        self.told: list[float] = []
        self.is_kept_awake = self.has_to_end = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_asked = 0
        self.sleeper = LightSleeper(
            self.engine,
            lambda: after_s,
            lambda: next(self.memory),
            self.reports.append,
            self.ask,
            0.001,
            turn,
            turn_end,
            ends_instead=lambda: self.has_to_end,
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
        with self.sleeper.in_use() as use:
            told = list[float]()
            async for waited_s in self.sleeper.waking(use):
                told.append(waited_s)
                self.told.append(waited_s)
            return told

    async def use_until(self, may_end: asyncio.Event) -> None:
        """Use the engine until an event."""
        with self.sleeper.in_use() as use:
            async for _ in self.sleeper.waking(use):
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


async def test_failures_in_a_row_are_counted_until_it_sleeps() -> None:
    watched = Watched()
    watched.memory = iter(range(10_000))
    watched.engine.is_busy = True
    watched.sleeper.watch()
    await until(lambda: watched.sleeper.num_failures >= 2)
    watched.engine.is_busy = False
    await watched.reach(SleepState.ASLEEP)
    assert watched.sleeper.num_failures == 0


async def test_one_whose_process_is_to_end_stays_awake_until_then_or_until_it_may_stay() -> None:
    watched = Watched()
    watched.has_to_end = True
    watched.sleeper.watch()
    await until(lambda: watched.sleeper.ends_instead)
    assert (watched.engine.calls, watched.reports) == ([], [])
    with watched.sleeper.in_use():
        assert not watched.sleeper.ends_instead, "a request came first"
    await until(lambda: watched.sleeper.ends_instead)
    watched.has_to_end = False
    await watched.reach(SleepState.ASLEEP)
    assert not watched.sleeper.ends_instead


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
    with watched.sleeper.in_use() as use:
        assert [told async for told in watched.sleeper.waking(use)] == []
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
    await until(lambda: watched.sleeper._users)
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
        assert len(watched.sleeper._users) == 1
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


class HandTurn:
    """A turn that begins and ends when the test says so."""

    def __init__(self) -> None:
        self.begins, self.ends = asyncio.Event(), asyncio.Event()
        self.begins.set()
        self.is_held = True  # from the start on
        self.num_followed = self.num_told = 0

    async def taken(self) -> None:
        await self.begins.wait()
        self.is_held = True

    async def over(self) -> None:
        self.num_followed += 1
        await self.ends.wait()
        self.num_told += 1

    def free(self) -> None:
        self.is_held = False

    def end(self) -> None:
        """Let another model have the turn."""
        self.begins.clear()
        self.ends.set()

    def begin(self) -> None:
        self.ends.clear()
        self.begins.set()


class Taking(Watched):
    """A sleeper that takes turns; each of its users stays inside until it is parked or aborted."""

    def __init__(self, after_s: float | None = None, patience_s: float = 3600) -> None:
        self.turn = HandTurn()
        super().__init__(
            after_s, self.turn, TurnEnd(self.park, self.abort, patience_s, self.end_process)
        )
        self.memory = iter(range(10_000))
        self.calls = self.engine.calls
        self.left = asyncio.Event()
        self.may_park = True
        self.num_ends = 0
        self.sleeper.watch()

    def park(self) -> None:
        self.calls.append("park")
        if self.may_park:
            self.leave()

    def abort(self) -> None:
        self.calls.append("abort")
        self.leave()

    def leave(self) -> None:
        """Let all that are inside end."""
        self.left.set()
        self.left = asyncio.Event()

    def end_process(self) -> None:
        self.num_ends += 1

    async def run(self) -> None:
        """Use the engine until it is parked or aborted."""
        with self.sleeper.in_use() as use:
            async for waited_s in self.sleeper.waking(use):
                self.told.append(waited_s)
            await self.left.wait()

    @property
    def num_inside(self) -> int:
        return sum(each.is_inside for each in self.sleeper._users)


@pytest.fixture
async def taking() -> AsyncIterator[Taking]:
    made = Taking()
    yield made
    made.sleeper.close()


async def test_a_turn_ends_with_all_parked_and_then_the_lease_is_free(taking: Taking) -> None:
    running = [asyncio.ensure_future(taking.run()) for _ in range(3)]
    await until(lambda: taking.num_inside == 3)
    taking.engine.may_sleep.clear()
    taking.turn.end()
    await asyncio.gather(*running)
    await until(lambda: "sleep" in taking.calls)
    assert taking.calls == ["park", "sleep"]
    assert taking.turn.is_held, "it still holds memory"
    taking.engine.may_sleep.set()
    await taking.reach(SleepState.ASLEEP)
    assert not taking.turn.is_held


async def test_who_comes_after_the_turn_waits_for_the_next_and_does_not_hold_up_the_sleep(
    taking: Taking,
) -> None:
    taking.may_park = False
    first = asyncio.ensure_future(taking.run())
    await until(lambda: taking.num_inside)
    taking.turn.end()
    await until(lambda: "park" in taking.calls)
    assert not taking.sleeper.is_ready
    late = asyncio.ensure_future(taking.use())
    await until(lambda: len(taking.sleeper._users) == 2)
    taking.leave()
    await first
    await taking.reach(SleepState.ASLEEP)
    num_told = len(taking.told)
    await until(lambda: len(taking.told) > num_told + 2)
    assert not taking.turn.is_held
    assert "wake" not in taking.calls
    taking.turn.begin()
    await late
    assert taking.turn.is_held
    assert taking.sleeper.is_ready


async def test_who_was_let_in_just_before_the_end_is_parked_too(taking: Taking) -> None:
    taking.may_park = False  # as one that is not accepted yet
    running = asyncio.ensure_future(taking.run())
    await until(lambda: taking.num_inside)
    taking.turn.end()
    await until(lambda: "park" in taking.calls)
    taking.may_park = True
    await running
    await taking.reach(SleepState.ASLEEP)
    assert "abort" not in taking.calls


async def test_what_can_not_be_parked_goes_on_for_a_while_and_is_then_aborted() -> None:
    taking = Taking(patience_s=0.1)
    taking.may_park = False
    running = asyncio.ensure_future(taking.run())
    await until(lambda: taking.num_inside)
    taking.turn.end()
    await running
    await taking.reach(SleepState.ASLEEP)
    assert taking.calls[0] == "park"
    assert taking.calls[-2:] == ["abort", "sleep"]
    taking.sleeper.close()


async def test_a_use_that_does_not_end_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(light_sleep, "MAX_ABORT_S", 0.1)
    taking = Taking(patience_s=0)
    with taking.sleeper.in_use() as use:
        assert [told async for told in taking.sleeper.waking(use)] == []
        taking.turn.end()
        await until(lambda: taking.num_ends)
    taking.sleeper.close()


async def test_an_engine_that_can_not_sleep_ends_its_process(
    taking: Taking, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(light_sleep, "TICK_S", 0.001)
    taking.engine.is_busy = True
    taking.turn.end()
    await until(lambda: taking.num_ends)
    assert taking.calls.count("sleep") >= light_sleep.MAX_TRIES
    assert taking.turn.is_held, "the lease is freed with the process"
    assert "its process ends" in caplog.text


async def test_the_end_of_a_turn_goes_before_what_keeps_the_engine_awake(taking: Taking) -> None:
    taking.is_kept_awake = True
    taking.turn.end()
    await taking.reach(SleepState.ASLEEP)
    assert taking.num_asked == 0


async def test_a_turn_that_ends_while_it_wakes_or_falls_asleep_is_ended_after_that() -> None:
    taking = Taking(AFTER_S)
    taking.engine.may_sleep.clear()
    await taking.reach(SleepState.FALLING_ASLEEP)
    taking.turn.end()
    await until(lambda: taking.sleeper._following is not None)
    taking.engine.may_sleep.set()
    await taking.reach(SleepState.ASLEEP)
    assert taking.calls == ["sleep"]
    taking.turn.begin()
    taking.engine.may_wake.clear()
    running = asyncio.ensure_future(taking.run())
    await taking.reach(SleepState.WAKING)
    taking.turn.end()
    # It has waited anew since then, and so wakes after what follows the turn.
    num_told = len(taking.told)
    await until(lambda: len(taking.told) > num_told + 1)
    taking.engine.may_wake.set()
    await taking.reach(SleepState.ASLEEP)
    assert taking.calls == ["sleep", "wake", "sleep"]
    assert not running.done(), "it waits for the next turn"
    taking.turn.begin()
    await until(lambda: taking.num_inside)
    taking.leave()
    await running
    taking.sleeper.close()


async def test_a_turn_that_ended_before_it_could_wake_does_not_end_the_next_one() -> None:
    taking = Taking(AFTER_S)
    await taking.reach(SleepState.ASLEEP)  # idle, in its turn
    taking.turn.begins.clear()
    running = asyncio.ensure_future(taking.run())
    await until(lambda: taking.sleeper._change is not None)
    taking.turn.end()
    await until(lambda: taking.turn.num_told == 1)
    taking.turn.begin()
    await until(lambda: taking.num_inside)
    await until(lambda: taking.turn.num_followed == 2 or "park" in taking.calls)
    assert taking.calls == ["sleep", "wake"]
    taking.leave()
    await running
    taking.sleeper.close()


async def test_one_that_is_kept_awake_wakes_in_its_turn_although_nobody_asks(
    taking: Taking,
) -> None:
    taking.turn.end()
    await taking.reach(SleepState.ASLEEP)
    await until(lambda: taking.sleeper._change is None)
    taking.sleeper.wake_if_kept()  # a health check
    await until(lambda: taking.num_asked == 1 and taking.sleeper._change is None)
    taking.is_kept_awake = True
    taking.sleeper.wake_if_kept()
    await until(lambda: taking.num_asked == 2)
    assert taking.sleeper.state is SleepState.ASLEEP
    taking.turn.begin()
    await taking.reach(SleepState.AWAKE)
    assert taking.turn.is_held
    taking.sleeper.wake_if_kept()
    assert taking.num_asked == 2


async def test_one_without_turns_wakes_only_for_those_who_ask() -> None:
    async with asleep() as watched:
        await until(lambda: watched.sleeper._change is None)
        watched.is_kept_awake = True
        watched.sleeper.wake_if_kept()
        assert watched.sleeper._change is None


async def test_an_idle_model_gives_its_memory_and_the_lease_back_in_its_turn() -> None:
    taking = Taking(AFTER_S)
    await taking.reach(SleepState.ASLEEP)
    assert not taking.turn.is_held
    await taking.use()
    assert taking.turn.is_held
    taking.sleeper.close()


async def test_turns_come_and_go(taking: Taking) -> None:
    for _ in range(3):
        taking.turn.begin()
        running = asyncio.ensure_future(taking.run())
        await until(lambda: taking.num_inside)
        taking.turn.end()
        await running
        await taking.reach(SleepState.ASLEEP)
    assert taking.calls == ["park", "sleep", *["wake", "park", "sleep"] * 2]


async def test_one_that_is_closed_waits_for_no_turn(taking: Taking) -> None:
    taking.turn.end()
    await taking.reach(SleepState.ASLEEP)
    waiting = asyncio.ensure_future(taking.use())
    await until(lambda: taking.sleeper._change is not None)
    waiting.cancel()
    await asyncio.wait([waiting])
    taking.sleeper.close()
    await until(lambda: taking.sleeper._change is None)
    taking.turn.begin()
    assert "wake" not in taking.calls
    assert taking.sleeper._following is None
