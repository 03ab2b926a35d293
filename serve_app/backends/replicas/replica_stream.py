"""A stream at one replica, which raises if the replica is lost before the text has ended."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Final, Self

from deployments.contract.claims import StreamCost
from deployments.contract.errors import (
    GenerationAbortedError,
    GenerationFailedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.gen_ai_spans import ModelSpan, end
from deployments.contract.generation import Accepted, GenerationEvent
from deployments.contract.output import FinishReason, TextDelta
from serve_app.backends.replicas.handles import Responses, cancel, read_to_end
from serve_app.backends.replicas.replica_errors import ParkedError
from serve_app.backends.replicas.stream_box import StreamBox
from serve_app.backends.replicas.token_channels import TokenChannels

LAST_DELTA_TIMEOUT_S: Final = 5.0
"""How long a stream may go on after its call has ended. The last delta is sent before the call
ends, by another way; normally it arrives first."""


class ReplicaStream:
    """A stream that a replica has accepted.

    It ends for its reader with the last delta. The replica's call is read to its end in the
    background, so that Serve counts it as ended.
    """

    waited_until_s: ClassVar[float] = 0.0
    """It ends with its replica, and waits for no other."""

    _watched: ClassVar[set[asyncio.Future[None]]] = set()
    """Keeps the tasks that read calls to their ends: the event loop alone does not."""

    def __init__(
        self,
        responses: Responses[GenerationEvent],
        accepted: Accepted,
        box: StreamBox,
        channels: TokenChannels,
        span: ModelSpan | None = None,
        *,
        waits_no_more: Callable[[], None] = lambda: None,
        count: Callable[[float], None] = lambda served: None,
        num_new_prompt_tokens: int = 0,
    ) -> None:
        """Take over a call after its answer.

        Args:
            responses: The replica's call.
            accepted: The replica's answer.
            box: Where the deltas arrive.
            channels: What drops the box when the stream has ended.
            span: The call's span; None if its trace is not recorded.
            waits_no_more: Called when the first deltas have come, and when it ends.
            count: Counts the weighted tokens that the stream passes on; see `FairShares.charge`.
            num_new_prompt_tokens: Tokens of the prompt; 0 if the answer has begun elsewhere.
        """
        self.accepted = accepted
        self._waits_no_more = waits_no_more
        self._count = count
        self._cost = StreamCost(num_new_prompt_tokens)
        self._responses = responses
        self._box = box
        self._channels = channels
        self._span = span
        self._error: RaystreamError | None = None
        self._ended = False
        watching = asyncio.ensure_future(self._watch())
        self._watched.add(watching)
        watching.add_done_callback(self._watched.discard)

    def __aiter__(self) -> Self:
        """Return itself: a stream is read once."""
        return self

    async def __anext__(self) -> list[TextDelta]:
        """Return the deltas that have become ready since the last call.

        Raises:
            ReplicaUnavailableError: The replica, its engine or the channel to it is lost.
            GenerationAbortedError: The replica was stopped; the text may go on elsewhere.
            GenerationFailedError: The sequence has failed.
            ParkedError: The replica has given the text back.
        """
        if self._error is not None:
            raise self._error
        if self._ended:
            raise StopAsyncIteration
        try:
            deltas = await self._box.take()
        except RaystreamError as error:
            end(self._span, error)
            await self.aclose()
            raise
        if self._span is not None:
            for delta in deltas:
                self._span.gained(delta)
        self._count(self._cost.of(deltas))
        self._waits_no_more()
        if deltas[-1].finish_reason is None:
            return deltas
        self._error = _error_of(deltas[-1])
        self._end()
        if self._error is None:
            return deltas
        failure = self._error.message if isinstance(self._error, GenerationFailedError) else None
        gained = replace(TextDelta.join(deltas), finish_reason=None, error=failure)
        if not gained.token_ids and not gained.text:
            raise self._error
        return [gained]

    async def aclose(self) -> None:
        """Cancel the replica's call unless the stream has ended; closing twice is harmless."""
        if not self._ended:
            self._end()
            self._box.fail(ReplicaUnavailableError("The stream is closed."))
            cancel(self._responses)

    def _end(self) -> None:
        self._ended = True
        self._waits_no_more()
        end(self._span, None if isinstance(self._error, ParkedError) else self._error)
        self._channels.close(self._box)

    async def _watch(self) -> None:
        """Read the call to its end; then the last delta must come soon."""
        await read_to_end(self._responses)
        if not self._box.is_complete and not self._ended:
            asyncio.get_running_loop().call_later(
                LAST_DELTA_TIMEOUT_S,
                self._box.fail,
                ReplicaUnavailableError("The model's replica has ended the request."),
            )


def _error_of(last: TextDelta) -> RaystreamError | None:
    """Return the error that a stream's last delta stands for; None for a true finish."""
    match last.finish_reason:
        case FinishReason.ABORT if last.error is not None:
            return ReplicaUnavailableError("The model's replica has failed.")
        case FinishReason.ABORT:
            return GenerationAbortedError("The text was aborted before it was finished.")
        case FinishReason.PARKED:
            return ParkedError("The text was parked.")
        case FinishReason.ERROR:
            return GenerationFailedError(last.error or "The sequence failed in the engine.")
    return None
