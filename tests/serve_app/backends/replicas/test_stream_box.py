import asyncio

import pytest

from deployments.contract.channel.wire import MIN_INTERVAL_S
from deployments.contract.errors import ReplicaUnavailableError
from deployments.contract.generation import StreamKey
from deployments.contract.output import FinishReason, TextDelta
from serve_app.backends.replicas.stream_box import MAX_SHARE, MAX_WAIT_S, Rounds, StreamBox
from tests.stopped_clock import Clock, settle

DELTAS = [TextDelta((i,), str(i)) for i in range(4)]
LAST = TextDelta((9,), "9", FinishReason.STOP)
LOST = ReplicaUnavailableError("lost")

pytestmark = pytest.mark.in_time


def make_box(rounds: Rounds | None = None) -> StreamBox:
    return StreamBox(StreamKey("me", 1), rounds or Rounds())


async def begun(rounds: Rounds | None = None) -> StreamBox:
    """Return a box whose first delta is taken."""
    box = make_box(rounds)
    box.put(DELTAS[0])
    assert await box.take() == [DELTAS[0]]
    return box


async def test_a_late_reader_gets_all_deltas_in_order() -> None:
    box = make_box()
    for delta in DELTAS:
        box.put(delta)
    assert await box.take() == DELTAS


async def test_the_first_delta_and_the_last_wake_their_reader_at_once(advance: Clock) -> None:
    rounds = Rounds()
    busy = await begun(rounds)
    busy.put(DELTAS[1])
    await settle()  # a round has just been
    assert await busy.take() == [DELTAS[1]]
    box = make_box(rounds)
    reader = asyncio.ensure_future(box.take())
    await settle()
    box.put(DELTAS[0])
    await settle()
    assert reader.result() == [DELTAS[0]]
    reader = asyncio.ensure_future(box.take())
    box.put(DELTAS[1])
    await settle()
    assert not reader.done()
    box.put(LAST)
    await settle()
    assert reader.result() == [DELTAS[1], LAST]
    assert box.is_complete


async def test_between_first_and_last_readers_are_woken_once_in_an_interval(advance: Clock) -> None:
    rounds = Rounds()
    boxes = [await begun(rounds) for _ in range(2)]
    for box in boxes:
        box.put(DELTAS[1])
    await settle()
    assert [await box.take() for box in boxes] == [[DELTAS[1]]] * 2
    for _ in range(3):
        readers = [asyncio.ensure_future(box.take()) for box in boxes]
        for delta in DELTAS[2:]:
            for box in boxes:
                box.put(delta)
            advance(0.4 * MIN_INTERVAL_S)
            await settle()
            assert not any(reader.done() for reader in readers)
        advance(0.21 * MIN_INTERVAL_S)
        await settle()
        assert [reader.result() for reader in readers] == [DELTAS[2:]] * 2


async def test_the_longer_readers_take_the_rarer_they_are_woken(advance: Clock) -> None:
    box = await begun()
    busy_s = 5 * MIN_INTERVAL_S

    async def read_slowly() -> None:
        await box.take()
        advance(busy_s)

    reader = asyncio.ensure_future(read_slowly())
    await settle()
    box.put(DELTAS[1])
    await settle()
    assert reader.done()
    box.put(DELTAS[2])
    next_reader = asyncio.ensure_future(box.take())
    advance(0.9 * (busy_s / MAX_SHARE - busy_s))
    await settle()
    assert not next_reader.done()
    advance(0.2 * (busy_s / MAX_SHARE - busy_s))
    await settle()
    assert next_reader.result() == [DELTAS[2]]


async def test_readers_do_not_wait_as_long_again_after_their_process_was_stopped(
    advance: Clock,
) -> None:
    box = await begun()
    box.put(DELTAS[1])
    advance(10 * MAX_WAIT_S)
    await settle()
    assert await box.take() == [DELTAS[1]]
    box.put(DELTAS[2])
    reader = asyncio.ensure_future(box.take())
    advance(MAX_WAIT_S)
    await settle()
    assert reader.result() == [DELTAS[2]]


async def test_a_cancelled_reader_leaves_the_deltas() -> None:
    box = make_box()
    reader = asyncio.ensure_future(box.take())
    await settle()
    reader.cancel()
    await asyncio.wait([reader])
    box.put(DELTAS[0])
    assert await box.take() == [DELTAS[0]]


async def test_a_failed_stream_gives_what_has_arrived_and_then_the_error_each_time() -> None:
    box = await begun()
    box.put(DELTAS[1])
    box.fail(LOST)
    box.put(DELTAS[3])  # DELTAS[2] may be lost
    assert await box.take() == [DELTAS[1]]
    for _ in range(2):
        with pytest.raises(ReplicaUnavailableError):
            await box.take()


async def test_a_complete_stream_does_not_fail() -> None:
    box = make_box()
    box.put(LAST)
    box.fail(LOST)
    assert await box.take() == [LAST]


async def test_a_round_after_the_last_take_gives_nothing(advance: Clock) -> None:
    box = await begun()
    box.put(DELTAS[1])  # for the next round
    box.put(LAST)
    assert await box.take() == [DELTAS[1], LAST]
    reader = asyncio.ensure_future(box.take())
    advance(MIN_INTERVAL_S)
    await settle()
    assert not reader.done()
    reader.cancel()
