"""A stream of deltas as a surface reads it: text with exact counts, or an error.

A stream that ends without a true finish raises, so that no surface can take a broken text for a
complete one.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

from deployments.contract.errors import (
    GenerationAbortedError,
    GenerationFailedError,
    RaystreamError,
    ReplicaUnavailableError,
    overload_reason,
)
from deployments.contract.output import FinishReason, TextDelta
from serve_app.backends.replicas.generation import GenerationStream
from serve_app.http.request_record import current_record

TrueFinish = Literal["stop", "length"]


async def joined_deltas(
    stream: GenerationStream, choice_index: int = 0
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield the choice's index and one delta for each list of deltas that arrived together.

    The index costs nothing here; another generator around this one would cost time per message.

    Args:
        stream: The source of the deltas.
        choice_index: The index of the stream's answer in the request.

    Raises:
        GenerationFailedError: The sequence failed in the engine.
        GenerationAbortedError: The sequence was aborted, though its reader is still here.
        ReplicaUnavailableError: The stream ended without a finish.
        RaystreamError: The replica has failed.
    """
    record = current_record()
    finished = False
    try:
        async for deltas in stream:
            if not deltas:
                continue
            delta = TextDelta.join(deltas)
            finish = true_finish(delta)
            finished = finished or finish is not None
            if record is not None:
                record.gained(len(delta.token_ids), finish)
            yield choice_index, delta
        if not finished:
            raise ReplicaUnavailableError("The text ended before it was finished.")
    except RaystreamError as error:
        if record is not None:
            record.failed(error.code, overload_reason(error))
        raise


async def read_to_end(stream: GenerationStream) -> TextDelta:
    """Read the stream to its end, close it, and return all of it as one delta.

    Raises:
        RaystreamError: See `joined_deltas`.
    """
    async with aclosing(stream):
        return TextDelta.join([delta async for _, delta in joined_deltas(stream)])


def true_finish(delta: TextDelta) -> TrueFinish | None:
    """Return why the text ended, as OpenAI names it; None if it goes on.

    Raises:
        GenerationFailedError: The sequence failed in the engine.
        GenerationAbortedError: The sequence was aborted.
    """
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
