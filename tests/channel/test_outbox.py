import pytest

from deployments.channel import outbox as module
from deployments.channel.outbox import Outbox
from deployments.contract.channel.wire import (
    MAX_MESSAGE_BYTES,
    MIN_INTERVAL_S,
    Entry,
    FrameReader,
    decode_message,
)
from deployments.contract.output import FinishReason, PromptLogprobs, TextDelta
from tests.stopped_clock import Clock, settle

LAST = TextDelta((9,), "!", FinishReason.STOP)
ABORTED = TextDelta((), "", FinishReason.ABORT)


def gain(token_id: int) -> TextDelta:
    return TextDelta((token_id,), str(token_id))


@pytest.fixture
def unpaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each flush send."""
    monkeypatch.setattr(module, "MIN_INTERVAL_S", 0.0)


class Ingress:
    """Collects what an outbox sends; its buffer is full after some messages."""

    def __init__(self, outbox: Outbox, room: int = 10**6) -> None:
        self.messages: list[list[Entry]] = []
        self._outbox = outbox
        self._room = room

    def send(self, frame: bytes) -> None:
        (payload,) = FrameReader(MAX_MESSAGE_BYTES).feed(frame)
        self.messages.append(decode_message(payload))
        self._room -= 1
        self._outbox.is_paused = self._room <= 0

    def read(self, room: int) -> None:
        self._room = room
        self._outbox.is_paused = False
        self._outbox.send()


def connected(room: int = 10**6) -> tuple[Outbox, Ingress]:
    outbox = Outbox()
    ingress = Ingress(outbox, room)
    outbox.connect(ingress.send)
    return outbox, ingress


async def test_the_first_and_the_last_delta_leave_at_once_with_all_that_is_there(
    advance: Clock,
) -> None:
    outbox, ingress = connected()
    one = outbox.open(1)
    one.put(gain(0))
    outbox.flush()
    one.put(gain(1))
    outbox.flush()
    await settle()
    assert ingress.messages == [[(1, gain(0))]]
    two = outbox.open(2)
    two.put(gain(10))
    outbox.flush()
    assert ingress.messages[1:] == [[(1, gain(1)), (2, gain(10))]]
    one.put(LAST)
    outbox.flush()
    assert ingress.messages[2:] == [[(1, LAST)]]


async def test_between_first_and_last_there_is_one_message_for_each_interval(
    advance: Clock,
) -> None:
    outbox, ingress = connected()
    one = outbox.open(1)
    for step in range(41):
        one.put(gain(step))
        outbox.flush()
        await settle()
        advance(MIN_INTERVAL_S / 4)
    assert [delta.token_ids for message in ingress.messages for _, delta in message] == [
        (0,),
        *(tuple(range(step, step + 4)) for step in range(1, 41, 4)),
    ]


async def test_what_no_step_follows_leaves_when_it_is_due(advance: Clock) -> None:
    outbox, ingress = connected()
    one = outbox.open(1)
    for step in range(2):
        one.put(gain(step))
        outbox.flush()
    advance(2 * MIN_INTERVAL_S)
    await settle()
    assert ingress.messages == [[(1, gain(0))], [(1, gain(1))]]


@pytest.mark.usefixtures("unpaced")
async def test_what_all_streams_gained_is_one_message() -> None:
    outbox, ingress = connected()
    one, two = outbox.open(1), outbox.open(2)
    for step in range(2):
        one.put(gain(step))
        two.put(gain(10 + step))
        outbox.flush()
    outbox.flush()
    assert ingress.messages == [[(1, gain(0)), (2, gain(10))], [(1, gain(1)), (2, gain(11))]]


async def test_what_gathers_before_the_ingress_connects_is_sent_then_joined() -> None:
    outbox = Outbox()
    one = outbox.open(1)
    for step in range(3):
        one.put(gain(step))
        outbox.flush()
    ingress = Ingress(outbox)
    outbox.connect(ingress.send)
    assert ingress.messages == [[(1, TextDelta((0, 1, 2), "012"))]]


async def test_a_slow_ingress_gets_one_joined_entry_for_each_stream() -> None:
    outbox, ingress = connected(room=1)
    streams = [outbox.open(number) for number in range(3)]
    for step in range(100):
        for stream in streams:
            stream.put(gain(step))
        outbox.flush()
    assert len(ingress.messages) == 1
    ingress.read(room=1)
    rest = TextDelta.join([gain(step) for step in range(1, 100)])
    assert ingress.messages[1:] == [[(number, rest) for number in range(3)]]


async def test_a_long_backlog_is_sent_in_parts_that_wait_for_the_ingress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WEIGHT", 10)
    outbox = Outbox()
    ingress = Ingress(outbox, room=0)
    for number in range(3):
        stream = outbox.open(number)
        for step in range(8):
            stream.put(gain(step))
    outbox.connect(ingress.send)
    assert len(ingress.messages) == 1
    assert sum(len(delta.token_ids) for _, delta in ingress.messages[0]) == 10
    ingress.read(room=9)
    entries = [entry for message in ingress.messages for entry in message]
    whole = TextDelta.join([gain(step) for step in range(8)])
    for number in range(3):
        assert TextDelta.join([delta for n, delta in entries if n == number]) == whole


async def test_log_probabilities_of_prompts_that_have_gathered_are_sent_in_bounded_messages() -> (
    None
):
    num_entries = 21 * 512
    part = PromptLogprobs(None, 20, b"i" * 4 * num_entries, b"f" * 4 * num_entries, b"r" * 2048, ())
    scored = TextDelta((), "", prompt_logprobs=(part,))
    outbox = Outbox()
    ingress = Ingress(outbox, room=100)
    for number in range(4):
        stream = outbox.open(number)
        for _ in range(60):
            stream.put(scored)
        stream.put(gain(1))
    frames: list[int] = []

    def send(frame: bytes) -> None:
        frames.append(len(frame))
        ingress.send(frame)

    outbox.connect(send)
    assert max(frames) < MAX_MESSAGE_BYTES / 4
    entries = [entry for message in ingress.messages for entry in message]
    for number in range(4):
        whole = TextDelta.join([delta for n, delta in entries if n == number])
        assert whole.prompt_logprobs == (part,) * 60
        assert whole.token_ids == gain(1).token_ids


async def test_a_stream_ends_once_its_last_delta_is_on_its_way() -> None:
    outbox, ingress = connected(room=0)
    outbox.is_paused = True
    stream = outbox.open(1)
    stream.put(LAST)
    outbox.flush()
    assert not stream.is_delivered
    ingress.read(room=1)
    await stream.wait_until_ended()
    outbox.close(1)
    assert ingress.messages == [[(1, LAST)]]


async def test_a_stream_that_is_closed_early_is_dropped_and_told_to_be_aborted() -> None:
    outbox, ingress = connected(room=1)
    one, two = outbox.open(1), outbox.open(2)
    one.put(gain(0))
    outbox.flush()
    one.put(gain(1))
    two.put(gain(2))
    outbox.close(1)
    ingress.read(room=1)
    assert sorted(ingress.messages[1]) == [(1, ABORTED), (2, gain(2))]


async def test_all_streams_of_a_lost_ingress_end_and_their_deltas_are_dropped() -> None:
    outbox = Outbox()
    first = Ingress(outbox)
    outbox.connect(first.send)
    streams = [outbox.open(number) for number in range(2)]
    streams[0].put(gain(0))
    outbox.flush()
    streams[1].put(gain(1))
    outbox.disconnect()
    for stream in streams:
        await stream.wait_until_ended()
    again = Ingress(outbox)
    outbox.connect(again.send)
    for number in range(2):
        outbox.close(number)
    told = [entry for message in again.messages for entry in message]
    assert {number for number, _ in told} == {0, 1}
    assert {delta for _, delta in told} == {ABORTED}


async def test_a_number_that_is_in_use_is_refused() -> None:
    outbox = Outbox()
    outbox.open(1)
    with pytest.raises(AssertionError, match="stream 1"):
        outbox.open(1)
