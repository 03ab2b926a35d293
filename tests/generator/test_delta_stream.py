import asyncio
from collections.abc import Callable

import pytest

from deployments.engine.output import FinishReason, TextDelta
from deployments.generator.delta_stream import DeltaStream

DELTAS = [TextDelta((i,), str(i)) for i in range(4)]
LAST = TextDelta((9,), "9", FinishReason.STOP)
DEADLINE_S = 10


async def take(stream: DeltaStream) -> list[TextDelta]:
    async with asyncio.timeout(DEADLINE_S):
        return await stream.take()


async def test_a_late_reader_gets_all_deltas_in_order() -> None:
    stream = DeltaStream()
    for delta in DELTAS:
        stream.put(delta)
    assert await take(stream) == DELTAS


async def test_an_early_reader_is_woken() -> None:
    stream = DeltaStream()
    reader = asyncio.ensure_future(take(stream))
    await asyncio.sleep(0)
    assert not reader.done()
    stream.put(DELTAS[0])
    assert await reader == DELTAS[:1]


async def test_a_delta_is_given_only_once() -> None:
    stream = DeltaStream()
    stream.put(DELTAS[0])
    assert await take(stream) == DELTAS[:1]
    reader = asyncio.ensure_future(take(stream))
    await asyncio.sleep(0)
    assert not reader.done()
    stream.put(DELTAS[1])
    assert await reader == DELTAS[1:2]


async def test_deltas_between_waking_and_reading_are_not_lost() -> None:
    stream = DeltaStream()
    reader = asyncio.ensure_future(take(stream))
    await asyncio.sleep(0)
    for delta in DELTAS:
        stream.put(delta)
    assert await reader == DELTAS


async def test_a_cancelled_reader_leaves_the_deltas() -> None:
    stream = DeltaStream()
    reader = asyncio.ensure_future(take(stream))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    stream.put(DELTAS[0])
    assert await take(stream) == DELTAS[:1]


INTERVAL_S = 5.0

Clock = Callable[[float], None]


@pytest.fixture
async def advance(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stop the event loop's clock; return a function that advances it."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)

    def move(seconds: float) -> None:
        nonlocal now
        now += seconds

    return move


async def settle() -> None:
    """Run everything that is ready."""
    for _ in range(9):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("advance")
async def test_the_first_and_the_last_delta_are_given_at_once() -> None:
    stream = DeltaStream(lambda: INTERVAL_S)
    stream.put(DELTAS[0])
    assert await take(stream) == DELTAS[:1]
    stream.put(DELTAS[1])
    reader = asyncio.ensure_future(stream.take())
    await settle()
    assert not reader.done()
    stream.put(LAST)
    assert await take_now(reader) == [DELTAS[1], LAST]
    assert stream.is_finished


async def take_now(reader: asyncio.Future[list[TextDelta]]) -> list[TextDelta]:
    await settle()
    assert reader.done()
    return reader.result()


async def test_between_first_and_last_there_is_one_take_per_interval(advance: Clock) -> None:
    stream = DeltaStream(lambda: INTERVAL_S)
    stream.put(DELTAS[0])
    await take(stream)
    for _ in range(3):
        reader = asyncio.ensure_future(stream.take())
        stream.put(DELTAS[1])
        advance(0.9 * INTERVAL_S)
        stream.put(DELTAS[2])
        await settle()
        assert not reader.done()
        advance(0.1 * INTERVAL_S + 0.001)
        assert await take_now(reader) == DELTAS[1:3]


async def test_a_delta_after_an_interval_is_given_at_once(advance: Clock) -> None:
    stream = DeltaStream(lambda: INTERVAL_S)
    stream.put(DELTAS[0])
    await take(stream)
    reader = asyncio.ensure_future(stream.take())
    advance(INTERVAL_S)
    await settle()
    assert not reader.done()
    stream.put(DELTAS[1])
    assert await take_now(reader) == DELTAS[1:2]


async def test_a_timer_is_cancelled_when_the_last_delta_is_taken(advance: Clock) -> None:
    stream = DeltaStream(lambda: INTERVAL_S)
    stream.put(DELTAS[0])
    await take(stream)
    stream.put(DELTAS[1])
    stream.put(LAST)
    assert await take(stream) == [DELTAS[1], LAST]
    reader = asyncio.ensure_future(stream.take())
    advance(2 * INTERVAL_S)
    await settle()
    assert not reader.done()
    reader.cancel()
