"""Models that generate, as surfaces see them: Protocols, and Ray Serve's handles behind them.

A request's call is accepted or refused, and ends with its sequence; the deltas come through the
channel to the replica (`token_channels`). A call is cancelled when its reader stops early.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import ClassVar, Final, Protocol, Self, cast

from deployments.contract.descriptions import ModelDescription
from deployments.contract.errors import (
    GenerationAbortedError,
    GenerationFailedError,
    InvalidRequestError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.gen_ai_spans import ModelSpan, ModelSpans, end
from deployments.contract.generation import (
    Accepted,
    GenerationEvent,
    GenerationRequest,
    Refused,
    TokenizedPrompt,
    TokenizeRequest,
)
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.reasoning_format import PromptReasoning
from serve_app.backends.replicas.admission_queue import AdmissionQueue
from serve_app.backends.replicas.departures import Departures
from serve_app.backends.replicas.handles import (
    Handle,
    HandleBackend,
    Responses,
    cancel,
    first_answer,
    read_to_end,
)
from serve_app.backends.replicas.lost import LostAfterStartError
from serve_app.backends.replicas.offers import raise_refusal
from serve_app.backends.replicas.prefix_memory import prefix_keys
from serve_app.backends.replicas.running_replicas import RunningReplicas
from serve_app.backends.replicas.stream_box import StreamBox
from serve_app.backends.replicas.token_channels import TokenChannels
from serve_app.http.request_record import seconds_since_arrival

LAST_DELTA_TIMEOUT_S: Final = 5.0
"""How long a stream may go on after its call has ended. The last delta is sent before the call
ends, by another way; normally it arrives first."""


class GenerationStream(Protocol):
    """The deltas of one accepted request."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, counted by the replica."""
        ...

    @property
    def reasoning(self) -> PromptReasoning:
        """What the end of the prompt says about the model's reasoning."""
        ...

    @property
    def fingerprint(self) -> str | None:
        """The version of the model that began the text, and goes on with it."""
        ...

    @property
    def prompt_digest(self) -> bytes:
        """A digest of the prompt as the model reads it; see `Accepted`."""
        ...

    def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        """Iterate over lists of deltas: each holds all that became ready since the last.

        A delta's finish reason is a true one: a stream raises an error in place of others.

        Raises:
            RaystreamError: The replica has failed.
        """
        ...

    async def aclose(self) -> None:
        """Abort the sequence unless it has ended; closing twice is harmless.

        A reader that waits for deltas gets a `ReplicaUnavailableError`.
        """
        ...


class ReplicaStream(GenerationStream, Protocol):
    """A stream at one replica."""

    def watch(self, on_due: Callable[[], object]) -> None:
        """Call a function, once a second, while the stream should go on at another replica.

        It should while its replica is about to end and another one could take over.
        """
        ...


class GenerationBackend(Protocol):
    """One model, wherever it runs."""

    async def generate(self, request: GenerationRequest) -> GenerationStream:
        """Open a stream once the replica has accepted the request.

        Raises:
            RaystreamError: The request was refused, or no replica could take it.
        """
        ...

    async def describe(self) -> ModelDescription:
        """Return what the model can do. Waits while its replicas load.

        Raises:
            RaystreamError: No replica could answer.
        """
        ...

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        """Return a prompt's tokens.

        Raises:
            RaystreamError: The prompt can't be encoded, or no replica could answer.
        """
        ...

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of tokens.

        Raises:
            RaystreamError: The model knows no such token, or no replica could answer.
        """
        ...

    async def ping(self) -> None:
        """Exercise a replica's engine.

        Raises:
            RaystreamError: The engine is not healthy, or no replica could answer.
        """
        ...


class ReplicaBackend(GenerationBackend, Protocol):
    """A model whose streams end with their replicas."""

    async def generate(self, request: GenerationRequest) -> ReplicaStream:
        """Open a stream at one replica; see `GenerationBackend.generate`."""
        ...


class HandleGenerationBackend(HandleBackend[ModelDescription]):
    """A model behind a Ray Serve handle; see `ReplicaBackend`."""

    def __init__(
        self,
        handle: Handle,
        running: RunningReplicas | None = None,
        departures: Departures | None = None,
        spans: ModelSpans | None = None,
    ) -> None:
        """Wrap a model's handle; see `HandleBackend`.

        Args:
            handle: See there.
            running: See there. Serve's router also looks for prefixes in it.
            departures: Knows which replicas are about to end; None knows of none.
            spans: Starts the spans of calls; None starts none.
        """
        super().__init__(handle, running)
        self._generate = handle.options(method_name="generate", stream=True)
        self._queue = AdmissionQueue()
        self._departures = departures
        self._spans = spans

    async def generate(self, request: GenerationRequest) -> ReplicaStream:
        """Open a stream; see `GenerationBackend.generate`.

        Requests that belong to admitted work skip the queue. So do suspects: a replica answers them
        when their turn has come, and others would wait behind them.
        """
        if request.is_admitted or request.num_deaths:
            return await self._offer(lambda: self._open(request))
        return await self._queue.run(lambda: self._offer(lambda: self._open(request)))

    async def _open(self, request: GenerationRequest) -> ReplicaStream:
        """Return the stream that a replica has accepted.

        Raises:
            InvalidRequestError: The client has to mend the request.
            OverloadedError: The replica is full.
            ModelChangedError: The replica is of another version than the request needs.
            LostAfterStartError: The replica was lost after it had begun with the request.
            RaystreamError: See `first_answer`.
        """
        span = None if self._spans is None else self._spans.of_text(request)
        box = self._channels.open()
        try:
            sent = replace(
                request,
                stream=box.key,
                elapsed_s=seconds_since_arrival(),
                trace=None if span is None else span.context,
            )
            call = self._generate.remote(sent)
            responses = cast("Responses[GenerationEvent]", call)
            first = await first_answer(responses, self._channels)
            assert isinstance(first, Accepted | Refused), f"got a {type(first).__name__}"
            self._remember(request, first)
            raise_refusal(first)
        except BaseException as error:
            self._channels.close(box)
            end(span, error)
            raise
        assert isinstance(first, Accepted), "a refusal is raised"
        if span is not None:
            span.accepted(first.num_prompt_tokens, first.replica_id)
        stream = HandleGenerationStream(
            responses, first, box, self._channels, self._departures, span
        )
        try:
            assert first.channel is not None, "a replica says where it listens"
            await self._channels.connect(box, first.channel)
        except BaseException as error:
            end(span, error)
            await stream.aclose()
            if isinstance(error, ReplicaUnavailableError):
                raise LostAfterStartError(*error.args) from error
            raise
        return stream

    def _remember(self, request: GenerationRequest, answer: Accepted | Refused) -> None:
        """Note for Serve's router where the prompt's keys and values will lie."""
        if isinstance(answer, Refused) and isinstance(answer.error, InvalidRequestError):
            return  # it says nothing about the replica
        prefixes = self._running.prefixes
        note = prefixes.note if isinstance(answer, Accepted) else prefixes.forget
        note(prefix_keys(request), answer.replica_id)

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        """Ask a replica; see `GenerationBackend.tokenize`."""
        return cast("TokenizedPrompt", await self._call("tokenize", request))

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """Ask a replica; see `GenerationBackend.detokenize`."""
        return cast("str", await self._call("detokenize", token_ids))


class HandleGenerationStream:
    """A stream that a replica has accepted.

    It ends for its reader with the last delta. The replica's call is read to its end in the
    background, so that Serve counts it as ended.
    """

    _watched: ClassVar[set[asyncio.Future[None]]] = set()
    """Keeps the tasks that read calls to their ends: the event loop alone does not."""

    def __init__(
        self,
        responses: Responses[GenerationEvent],
        accepted: Accepted,
        box: StreamBox,
        channels: TokenChannels,
        departures: Departures | None = None,
        span: ModelSpan | None = None,
    ) -> None:
        """Take over a call after its answer.

        Args:
            responses: The replica's call.
            accepted: The replica's answer.
            box: Where the deltas arrive.
            channels: What drops the box when the stream has ended.
            departures: See `HandleGenerationBackend`.
            span: The call's span; None if its trace is not recorded.
        """
        self.num_prompt_tokens = accepted.num_prompt_tokens
        self.reasoning = accepted.reasoning
        self.fingerprint = accepted.fingerprint
        self.prompt_digest = accepted.prompt_digest
        self._replica_id = accepted.replica_id
        self._departures = departures
        self._unwatch: Callable[[], object] = lambda: None
        self._responses = responses
        self._box = box
        self._channels = channels
        self._span = span
        self._error: RaystreamError | None = None
        self._ended = False
        watching = asyncio.ensure_future(self._watch())
        self._watched.add(watching)
        watching.add_done_callback(self._watched.discard)

    def watch(self, on_due: Callable[[], object]) -> None:
        """Call a function while the stream should leave; see `ReplicaStream.watch`."""
        if self._departures is not None and not self._ended:
            self._unwatch = self._departures.watch(self._replica_id, on_due)

    def __aiter__(self) -> Self:
        """Return itself: a stream is read once."""
        return self

    async def __anext__(self) -> list[TextDelta]:
        """Return the deltas that have become ready since the last call.

        Raises:
            ReplicaUnavailableError: The replica, its engine or the channel to it is lost.
            GenerationAbortedError: The replica was stopped; the text may go on elsewhere.
            GenerationFailedError: The sequence has failed.
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
        if deltas[-1].finish_reason is None:
            return deltas
        self._error = _error_of(deltas[-1])
        self._end()
        if self._error is None:
            return deltas
        gained = replace(TextDelta.join(deltas), finish_reason=None, error=None)
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
        end(self._span, self._error)
        self._unwatch()
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
        case FinishReason.ERROR:
            return GenerationFailedError(last.error or "The sequence failed in the engine.")
    return None
