import pytest

from deployments.contract.errors import (
    GenerationAbortedError,
    GenerationFailedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.output import FinishReason, TextDelta
from serve_app.backends.streams.text_stream import joined_deltas, read_to_end, true_finish
from tests.serve_app.fakes import HELLO, FakeStream, Step


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


@pytest.mark.parametrize(
    ("last", "error"),
    [
        ([TextDelta((), "", FinishReason.ABORT)], GenerationAbortedError),
        ([TextDelta((), "", FinishReason.ERROR, "out of memory")], GenerationFailedError),
        ([], ReplicaUnavailableError),
        (ReplicaUnavailableError("gone"), ReplicaUnavailableError),
    ],
)
async def test_a_text_that_was_not_finished_raises(last: Step, error: type[RaystreamError]) -> None:
    stream = FakeStream([[TextDelta((1,), "a")], last], 7)
    with pytest.raises(error):
        await read_to_end(stream)
    assert stream.closed.is_set()


async def test_the_engine_s_error_message_is_passed_on() -> None:
    stream = FakeStream([[TextDelta((), "", FinishReason.ERROR, "out of memory")]], 7)
    with pytest.raises(GenerationFailedError, match="out of memory"):
        await read_to_end(stream)


async def test_length_is_told_apart_from_stop() -> None:
    stream = FakeStream([[TextDelta((1,), "a", FinishReason.LENGTH)]], 7)
    assert true_finish(await read_to_end(stream)) == "length"
