import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from deployments.contract.errors import (
    GenerationAbortedError,
    GenerationFailedError,
    ReplicaUnavailableError,
)
from deployments.contract.output import EngineStats, FinishReason, TextDelta
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.engine_thread import EngineDeadError
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.generator.async_engine import AsyncEngine
from tests.engine.shared_traces import shared_traces
from tests.engine.tiny_models import load, make_engine, qwen2
from tests.failing import failing

__all__ = ["shared_traces"]  # a fixture

pytestmark = pytest.mark.usefixtures("shared_traces")

ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
LAST = TextDelta((1,), "a", FinishReason.STOP)


loaded = cache(load)


def make_tiny_engine() -> Engine:
    engine = make_engine(loaded(qwen2), max_num_seqs=1, max_model_len=4096)
    engine.warm_up()
    return engine


@dataclass(frozen=True)
class Bare:
    """An engine about whose model the replica is told nothing."""

    engine: Engine
    facts: Any = None


class Observed(AsyncEngine):
    """An engine that keeps its stats."""

    def __init__(self, make_engine: Callable[[], Engine] = make_tiny_engine) -> None:
        super().__init__(lambda: Bare(make_engine()), self.see)
        self.seen: list[EngineStats] = []

    def see(self, stats: EngineStats) -> None:
        self.seen.append(stats)


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    made = Observed()
    made.start()
    yield made
    made.stop()


def endless(name: str) -> SequenceRequest:
    return SequenceRequest(name, (1, 2, 3), ENDLESS)


class Gains:
    """Takes the deltas of a sequence, for a reader that waits for each."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[TextDelta] = asyncio.Queue()
        self.take = self._queue.put_nowait

    async def next(self) -> TextDelta:
        async with asyncio.timeout(60):
            return await self._queue.get()

    async def next_of(self, num: int) -> list[TextDelta]:
        return [await self.next() for _ in range(num)]

    async def last(self) -> TextDelta:
        while (delta := await self.next()).finish_reason is None:
            pass
        return delta


async def test_start_raises_the_error_of_making_the_engine() -> None:
    with pytest.raises(MemoryError, match="too large"):
        Observed(failing(MemoryError("the model is too large"))).start()


async def test_a_ping_does_not_wait_for_its_turn(engine: AsyncEngine) -> None:
    gains = Gains()
    with engine.running(endless("busy"), gains.take):
        await gains.next()
        async with asyncio.timeout(10):
            await engine.ping()
            await engine.ping()
        await gains.next()


async def test_a_ping_of_a_failing_engine_raises(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "deployments.engine.model.traced_forward.store_and_attend",
        failing(RuntimeError("the device is gone")),
    )
    with pytest.raises(GenerationFailedError):
        await engine.ping()


async def test_an_engine_that_runs_but_gives_no_tokens_is_not_healthy(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.check_health()

    monkeypatch.setattr(
        "deployments.engine.recovery.sampling_recovery.sample", failing(ValueError("a bug"))
    )
    for i in range(2):
        gains = Gains()
        with engine.running(endless(f"r{i}"), gains.take):
            failed = await gains.last()
        assert failed.finish_reason is FinishReason.ERROR
        assert "sampled" in (failed.error or "")
        with pytest.raises(GenerationFailedError, match="sampled"):
            await engine.check_health()


async def test_a_bug_in_the_engine_fails_its_health_and_its_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = make_tiny_engine()
    engine = Observed(lambda: inner)
    engine.start()

    gains = Gains()
    with engine.running(endless("r"), gains.take):
        await gains.next()
        monkeypatch.setattr(inner._scheduler, "schedule", failing(KeyError("a bug")))
        last = await gains.last()
    assert last.finish_reason is FinishReason.ABORT
    assert "failed" in (last.error or "")
    with pytest.raises(ReplicaUnavailableError), engine.running(endless("late"), gains.take):
        pass
    with pytest.raises(EngineDeadError):
        await engine.check_health()


async def test_an_engine_that_has_just_worked_computes_nothing_for_its_check(
    engine: AsyncEngine,
) -> None:
    await engine.ping()
    num_steps = engine.stats.num_steps
    await engine.check_health()
    assert engine.stats.num_steps == num_steps
    await engine.check_health()
    assert engine.stats.num_steps > num_steps


class Hanging:
    """An engine that hangs in its next step until told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_step_s: float) -> None:
        self.inner = make_tiny_engine()
        self.inner.max_step_s = max_step_s
        self.hangs, self.may_go_on = threading.Event(), threading.Event()
        step = self.inner.step

        def hang() -> list[tuple[str, TextDelta]]:
            self.hangs.set()
            assert self.may_go_on.wait(60)
            return step()

        monkeypatch.setattr(self.inner, "step", hang)
        monkeypatch.setattr("deployments.compute.work_watch.ANSWER_S", 0.1)
        self.engine = Observed(lambda: self.inner)
        self.engine.start()


async def test_a_step_that_hangs_fails_the_health_and_ends_the_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hanging = Hanging(monkeypatch, max_step_s=0.0)
    engine = hanging.engine
    gains = Gains()
    with engine.running(endless("r"), gains.take):
        assert await asyncio.to_thread(hanging.hangs.wait, 60)
        with pytest.raises(EngineDeadError, match="hangs"):
            await engine.check_health()
        last = await gains.last()
    assert last.finish_reason is FinishReason.ABORT
    assert "failed" in (last.error or "")
    with pytest.raises(ReplicaUnavailableError), engine.running(endless("late"), gains.take):
        pass
    engine.stop()  # although the step hangs
    hanging.may_go_on.set()


async def test_a_long_step_is_no_reason_to_fail_the_health(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging(monkeypatch, max_step_s=1e9)
    engine = hanging.engine
    gains = Gains()
    with engine.running(endless("r"), gains.take):
        assert await asyncio.to_thread(hanging.hangs.wait, 60)
        for _ in range(2):
            await engine.check_health()
        hanging.may_go_on.set()
        assert (await gains.next()).finish_reason is None
    engine.stop()


async def test_streams_of_an_engine_that_ends_may_be_resumed_elsewhere(engine: AsyncEngine) -> None:
    gains = Gains()
    with engine.running(endless("r"), gains.take):
        await gains.next()
        await asyncio.to_thread(engine.stop)
        last = await gains.last()
    assert (last.finish_reason, last.error) == (FinishReason.ABORT, None)
    with pytest.raises(GenerationAbortedError), engine.running(endless("late"), gains.take):
        pass


async def test_a_block_that_ends_early_aborts_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging(monkeypatch, max_step_s=1e9)
    engine = hanging.engine
    with engine.running(endless("left"), Gains().take):
        assert await asyncio.to_thread(hanging.hangs.wait, 60)
    hanging.may_go_on.set()
    await engine.ping()
    async with asyncio.timeout(60):
        while engine.stats.num_running:
            await engine.ping()
    engine.stop()
    assert engine.stats.num_steps < 100, "it was not aborted, but ran to its end"


class Spreading(Observed):
    """Streams that the test feeds; the engine's thread is never started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.gains = {name: Gains() for name in ("a", "b")}
        self.num_calls = 0
        self.real_loop = asyncio.get_running_loop()
        monkeypatch.setattr(self, "_takers", {n: g.take for n, g in self.gains.items()})
        monkeypatch.setattr(self, "_loop", self)

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        """Count the call and pass it on to the loop."""
        self.num_calls += 1
        self.real_loop.call_soon_threadsafe(callback)

    def hand_over(self, *deltas: tuple[str, TextDelta]) -> None:
        self._hand_over(list(deltas))


@pytest.fixture
async def spreading(monkeypatch: pytest.MonkeyPatch) -> Spreading:
    return Spreading(monkeypatch)


def gain(token_id: int, reason: FinishReason | None = None) -> TextDelta:
    return TextDelta((token_id,), str(token_id), reason)


async def test_steps_that_the_loop_has_not_handled_take_one_call(spreading: Spreading) -> None:
    for i in range(5):
        spreading.hand_over(("a", gain(i)), ("b", gain(10 + i)), ("gone", gain(20 + i)))
    assert spreading.num_calls == 1
    assert await spreading.gains["a"].next_of(5) == [gain(i) for i in range(5)]
    assert await spreading.gains["b"].next_of(5) == [gain(10 + i) for i in range(5)]
    assert len(spreading.seen) == 1
    spreading.hand_over(("a", gain(5)))
    assert spreading.num_calls == 2
    assert await spreading.gains["a"].next() == gain(5)


async def test_deltas_handed_over_during_a_call_get_their_own_call(
    spreading: Spreading, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = [("a", gain(1)), ("a", gain(2))]

    def observe(_: EngineStats) -> None:
        if late:
            spreading.hand_over(late.pop(0))

    monkeypatch.setattr(spreading, "_on_stats", observe)
    spreading.hand_over(("a", gain(0)))
    assert await spreading.gains["a"].next_of(3) == [gain(0), gain(1), gain(2)]
    assert spreading.num_calls == 3


async def test_nothing_is_lost_when_the_engine_hands_over_while_the_loop_spreads(
    spreading: Spreading,
) -> None:
    num_tokens = 5000

    def run_steps() -> None:
        for i in range(num_tokens - 1):
            spreading.hand_over(("a", gain(i)))
        spreading.hand_over(("a", gain(num_tokens - 1, FinishReason.LENGTH)))

    engine = asyncio.create_task(asyncio.to_thread(run_steps))
    found = await spreading.gains["a"].next_of(num_tokens)
    await engine
    assert [i for delta in found for i in delta.token_ids] == list(range(num_tokens))


async def test_one_that_fails_to_take_its_deltas_does_not_keep_others_from_theirs(
    engine: AsyncEngine,
) -> None:
    loop = asyncio.get_running_loop()
    errors: list[object] = []
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    gains = Gains()
    engine._loop = loop
    engine._takers |= {"bad": failing(ValueError("a bug")), "good": gains.take}
    engine._hand_over([("bad", LAST), ("good", LAST)])
    assert await gains.next() == LAST
    assert [type(error) for error in errors] == [ValueError]
    loop.set_exception_handler(None)
