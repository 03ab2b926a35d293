import pytest

from deployments.contract.errors import ReplicaUnavailableError
from deployments.contract.output import FinishReason, TextDelta
from serve_app.backends.streams.text_stream import joined_deltas, true_finish
from tests.serve_app.fakes import HELLO, FakeStream
from tests.serve_app.read_stream import read_to_end


async def test_deltas_that_arrive_together_are_joined() -> None:
    found = [delta async for delta in joined_deltas(FakeStream(HELLO, 7), choice_index=2)]
    assert found == [
        (2, TextDelta((11,), "Hello")),
        (2, TextDelta((12, 13, 14), ", world")),
        (2, TextDelta((15,), "!", FinishReason.STOP)),
    ]


async def test_reading_to_the_end_joins_all_deltas_and_closes_the_stream() -> None:
    stream = FakeStream(HELLO, 7)
    everything = TextDelta((11, 12, 13, 14, 15), "Hello, world!", FinishReason.STOP)
    assert await read_to_end(stream) == everything
    assert stream.closed.is_set()


async def test_a_text_that_was_not_finished_raises() -> None:
    stream = FakeStream([[TextDelta((1,), "a")], ReplicaUnavailableError("gone")], 7)
    with pytest.raises(ReplicaUnavailableError):
        await read_to_end(stream)
    assert stream.closed.is_set()


async def test_length_is_told_apart_from_stop() -> None:
    stream = FakeStream([[TextDelta((1,), "a", FinishReason.LENGTH)]], 7)
    assert true_finish(await read_to_end(stream)) == "length"
