"""A stream of deltas as a surface reads it: text with exact counts, or an error."""

from collections.abc import AsyncGenerator
from typing import Literal, cast

from deployments.contract.errors import RaystreamError, overload_reason
from deployments.contract.output import TextDelta
from serve_app.backends.replicas.backend import GenerationStream
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
        RaystreamError: The text was not finished; see `GenerationStream`.
    """
    record = current_record()
    try:
        async for deltas in stream:
            if not deltas:
                continue
            delta = TextDelta.join(deltas)
            if record is not None:
                record.gained(len(delta.token_ids), true_finish(delta))
            yield choice_index, delta
    except RaystreamError as error:
        if record is not None:
            record.failed(error.code, overload_reason(error))
        raise


def true_finish(delta: TextDelta) -> TrueFinish | None:
    """Return why the text ended, as OpenAI names it; None if it goes on."""
    reason = delta.finish_reason  # of a stream, which has no other
    return None if reason is None else cast("TrueFinish", reason.value)
