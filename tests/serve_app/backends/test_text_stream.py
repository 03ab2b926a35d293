import pytest

from deployments.contract import FinishReason, TextDelta
from deployments.errors import (
    GenerationAbortedError,
    GenerationFailedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from serve_app.generation import Piece, pieces, whole
from tests.serve_app.fakes import HELLO, FakeStream, Step


async def test_deltas_that_arrive_together_are_joined() -> None:
    found = [piece async for piece in pieces(FakeStream(HELLO, 7))]
    assert found == [Piece("Hello", 1), Piece(", world", 3), Piece("!", 1, "stop")]


async def test_the_whole_is_the_sum_of_its_pieces_and_closes_the_stream() -> None:
    stream = FakeStream(HELLO, 7)
    assert await whole(stream) == Piece("Hello, world!", 5, "stop")
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
        await whole(stream)
    assert stream.closed.is_set()


async def test_the_engine_s_word_on_a_failure_is_passed_on() -> None:
    stream = FakeStream([[TextDelta((), "", FinishReason.ERROR, "out of memory")]], 7)
    with pytest.raises(GenerationFailedError, match="out of memory"):
        await whole(stream)


async def test_length_is_told_apart_from_stop() -> None:
    stream = FakeStream([[TextDelta((1,), "a", FinishReason.LENGTH)]], 7)
    assert (await whole(stream)).finish_reason == "length"
