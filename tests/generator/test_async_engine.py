import asyncio
from collections.abc import Callable, Iterator

import pytest

from deployments.contract import FinishReason, SamplingParams, TextDelta
from deployments.engine.engine import Engine
from deployments.engine.engine_thread import EngineDeadError
from deployments.engine.output import EngineStats
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.errors import GenerationFailedError, ReplicaUnavailableError
from deployments.generator.async_engine import MIN_INTERVAL_S, AsyncEngine
from deployments.generator.delta_stream import DeltaStream
from tests.engine.tiny_models import load, make_engine, qwen2

ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


def make_tiny_engine() -> Engine:
    engine = make_engine(load(qwen2), num_slots=1, max_model_len=4096)
    engine.warm_up()
    return engine


class Observed(AsyncEngine):
    """An engine that keeps its stats."""

    def __init__(self, make_engine: Callable[[], Engine] = make_tiny_engine) -> None:
        super().__init__(make_engine, self.see)
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


async def test_start_raises_the_error_of_making_the_engine() -> None:
    def fail() -> Engine:
        raise MemoryError("the model is too large")

    with pytest.raises(MemoryError, match="too large"):
        Observed(fail).start()


async def test_a_ping_does_not_wait_for_a_slot(engine: AsyncEngine) -> None:
    with engine.running(endless("busy")) as gains:
        assert await anext(gains)
        async with asyncio.timeout(10):
            await engine.ping()
            await engine.ping()
        assert await anext(gains)


async def test_a_ping_of_a_failing_engine_raises(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("deployments.engine.model.traced_forward.attend_slots", fail)
    with pytest.raises(GenerationFailedError):
        await engine.ping()


async def test_an_engine_that_runs_but_gives_no_tokens_is_not_healthy(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.check_health()

    def fail(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("deployments.engine.recovery.sampling_recovery.sample", fail)
    for i in range(2):
        with (
            engine.running(endless(f"r{i}")) as gains,
            pytest.raises(GenerationFailedError, match="sampled"),
        ):
            await anext(gains)
        with pytest.raises(GenerationFailedError, match="sampled"):
            await engine.check_health()


async def test_a_bug_in_the_engine_fails_its_health_and_its_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = make_tiny_engine()
    engine = Observed(lambda: inner)
    engine.start()

    def fail() -> None:
        raise KeyError("a bug")

    with engine.running(endless("r")) as gains:
        await anext(gains)
        monkeypatch.setattr(inner._scheduler, "schedule", fail)
        with pytest.raises(ReplicaUnavailableError):
            async for _ in gains:
                pass
    with pytest.raises(EngineDeadError):
        await engine.check_health()


async def test_streams_of_an_engine_that_ends_may_be_resumed_elsewhere(
    engine: AsyncEngine,
) -> None:
    with engine.running(endless("r")) as gains:
        await anext(gains)
        await asyncio.to_thread(engine.stop)
        with pytest.raises(ReplicaUnavailableError):
            async for _ in gains:
                pass
    with pytest.raises(ReplicaUnavailableError), engine.running(endless("late")):
        pass


async def test_the_more_streams_there_are_the_longer_each_collects(engine: AsyncEngine) -> None:
    engine.max_messages_per_s = 8
    with engine.running(endless("a")):
        assert engine._interval_s() == 1 / 8
        with engine.running(endless("b")):
            assert engine._interval_s() == 2 / 8
        assert engine._interval_s() == 1 / 8
    assert engine._interval_s() == MIN_INTERVAL_S


class Spreading(Observed):
    """Streams that the test feeds; the engine's thread is never started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.streams = {name: DeltaStream() for name in ("a", "b")}
        self.num_calls = 0
        self.real_loop = asyncio.get_running_loop()
        monkeypatch.setattr(self, "_streams", self.streams)
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


async def test_steps_that_the_loop_has_not_handled_take_one_call(
    spreading: Spreading,
) -> None:
    for i in range(5):
        spreading.hand_over(("a", gain(i)), ("b", gain(10 + i)), ("gone", gain(20 + i)))
    assert spreading.num_calls == 1
    async with asyncio.timeout(10):
        assert await spreading.streams["a"].take() == [gain(i) for i in range(5)]
        assert await spreading.streams["b"].take() == [gain(10 + i) for i in range(5)]
    assert len(spreading.seen) == 1
    spreading.hand_over(("a", gain(5)))
    assert spreading.num_calls == 2
    async with asyncio.timeout(10):
        assert await spreading.streams["a"].take() == [gain(5)]


async def test_deltas_handed_over_during_a_call_get_their_own_call(
    spreading: Spreading, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = [("a", gain(1)), ("a", gain(2))]

    def observe(_: EngineStats) -> None:
        if late:
            spreading.hand_over(late.pop(0))

    monkeypatch.setattr(spreading, "_on_stats", observe)
    spreading.hand_over(("a", gain(0)))
    found = list[TextDelta]()
    async with asyncio.timeout(10):
        while len(found) < 3:
            found += await spreading.streams["a"].take()
    assert found == [gain(0), gain(1), gain(2)]
    assert spreading.num_calls == 3


async def test_nothing_is_lost_when_the_engine_hands_over_while_the_loop_spreads(
    spreading: Spreading,
) -> None:
    num_tokens, found = 5000, list[TextDelta]()

    def run_steps() -> None:
        for i in range(num_tokens - 1):
            spreading.hand_over(("a", gain(i)))
        spreading.hand_over(("a", gain(num_tokens - 1, FinishReason.LENGTH)))

    engine = asyncio.create_task(asyncio.to_thread(run_steps))
    stream = spreading.streams["a"]
    async with asyncio.timeout(60):
        while not stream.is_finished:
            found += await stream.take()
        await engine
    assert [i for delta in found for i in delta.token_ids] == list(range(num_tokens))
