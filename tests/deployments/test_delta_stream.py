import asyncio

from deployments.delta_stream import DeltaStream
from deployments.engine.output import TextDelta

DELTAS = [TextDelta((i,), str(i)) for i in range(4)]
DEADLINE_S = 10


async def take(stream: DeltaStream) -> list[TextDelta]:
    async with asyncio.timeout(DEADLINE_S):
        return await stream.take()


async def test_a_late_reader_gets_all_at_once_and_in_order() -> None:
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


async def test_what_was_taken_is_not_given_again() -> None:
    stream = DeltaStream()
    stream.put(DELTAS[0])
    assert await take(stream) == DELTAS[:1]
    reader = asyncio.ensure_future(take(stream))
    await asyncio.sleep(0)
    assert not reader.done()
    stream.put(DELTAS[1])
    assert await reader == DELTAS[1:2]


async def test_what_comes_between_waking_and_reading_is_not_lost() -> None:
    stream = DeltaStream()
    reader = asyncio.ensure_future(take(stream))
    await asyncio.sleep(0)
    for delta in DELTAS:
        stream.put(delta)
    assert await reader == DELTAS


async def test_a_reader_who_gives_up_leaves_the_deltas() -> None:
    stream = DeltaStream()
    reader = asyncio.ensure_future(take(stream))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    stream.put(DELTAS[0])
    assert await take(stream) == DELTAS[:1]
