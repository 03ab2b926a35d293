"""What a surface makes of a stream of deltas: pieces of text with exact counts, or an error.

A stream that ends in any other way than by a true finish raises, so that no surface can take a
broken text for a whole one.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal, NamedTuple

from deployments.contract import FinishReason, TextDelta, TokenLogprobs
from deployments.errors import (
    GenerationAbortedError,
    GenerationFailedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from serve_app.access_log import current_record
from serve_app.backends import GenerationStream

TrueFinish = Literal["stop", "length"]


class Piece(NamedTuple):
    """The deltas that arrived together, joined. A tuple, since there is one for each message.

    Attributes:
        text: May be empty, while the replica holds text back.
        num_tokens: Token ids behind the text.
        finish_reason: Set on the last piece alone.
        logprobs: One for each token id, if they were asked for.
        num_cached_tokens: Tokens of the prompt that were not computed; on the first piece alone.
        choice_index: To which of a request's answers it belongs.
    """

    text: str
    num_tokens: int
    finish_reason: TrueFinish | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    choice_index: int = 0


async def pieces(stream: GenerationStream, choice_index: int = 0) -> AsyncGenerator[Piece, None]:
    """Yield a piece for each list of deltas.

    Args:
        stream: Where the deltas come from.
        choice_index: Which of a request's answers it is.

    Raises:
        GenerationFailedError: The sequence failed in the engine.
        GenerationAbortedError: The sequence was aborted, though the reader is still here.
        ReplicaUnavailableError: The stream ended without a finish.
        RaystreamError: The replica has failed.
    """
    record = current_record()
    finished = False
    try:
        async for deltas in stream:
            piece = _of_deltas(deltas, choice_index)
            finished = finished or piece.finish_reason is not None
            if record is not None:
                record.gained(piece.num_tokens, piece.finish_reason)
            yield piece
        if not finished:
            raise ReplicaUnavailableError("The text ended before it was finished.")
    except RaystreamError as error:
        if record is not None:
            record.failed(error.code)
        raise


async def whole(stream: GenerationStream) -> Piece:
    """Read the stream to its end, close it, and return all of it as one piece.

    Raises:
        RaystreamError: As `pieces` does.
    """
    async with aclosing(stream):
        return join([piece async for piece in pieces(stream)])


def join(parts: Sequence[Piece]) -> Piece:
    """Return the pieces of a text, up to its last or some of them, as one."""
    return Piece(
        text="".join(part.text for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        finish_reason=parts[-1].finish_reason,
        logprobs=tuple(told for part in parts for told in part.logprobs),
        num_cached_tokens=sum(part.num_cached_tokens for part in parts),
        choice_index=parts[-1].choice_index,
    )


def _of_deltas(deltas: list[TextDelta], choice_index: int) -> Piece:
    if not deltas:
        return Piece("", 0, choice_index=choice_index)
    delta = TextDelta.join(deltas)
    return Piece(
        delta.text,
        len(delta.token_ids),
        _finish(delta),
        delta.logprobs,
        delta.num_cached_tokens,
        choice_index,
    )


def _finish(delta: TextDelta) -> TrueFinish | None:
    match delta.finish_reason:
        case None:
            return None
        case FinishReason.STOP:
            return "stop"
        case FinishReason.LENGTH:
            return "length"
        case FinishReason.ABORT:
            raise GenerationAbortedError("The text was aborted before it was finished.")
        case FinishReason.ERROR:
            raise GenerationFailedError(delta.error or "The sequence failed in the engine.")
