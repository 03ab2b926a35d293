"""Models that generate, as surfaces see them: Protocols, and Ray Serve's handles behind them.

Every stream that was opened is cancelled when its reader stops early.
"""

from collections.abc import AsyncIterator, Callable
from typing import Protocol, Self, cast

from deployments.contract import (
    Accepted,
    GenerationEvent,
    GenerationRequest,
    ModelDescription,
    PromptReasoning,
    Refused,
    TextDelta,
    TokenizedPrompt,
    TokenizeRequest,
)
from deployments.errors import RaystreamError
from serve_app.backends.admission_queue import AdmissionQueue
from serve_app.backends.handles import (
    Handle,
    HandleBackend,
    Responses,
    first_answer,
    translated_errors,
)


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

    def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        """Iterate over lists of deltas: each holds all that became ready since the last.

        Raises:
            RaystreamError: The replica has failed.
        """
        ...

    async def aclose(self) -> None:
        """Abort the sequence unless it has ended; closing twice is harmless."""
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


class HandleGenerationBackend(HandleBackend[ModelDescription]):
    """A model behind a Ray Serve handle; see `GenerationBackend`."""

    def __init__(self, handle: Handle, count_refusal: Callable[[], object] = lambda: None) -> None:
        """Wrap a model's handle; see `HandleBackend`."""
        super().__init__(handle, count_refusal)
        self._generate = handle.options(method_name="generate", stream=True)
        self._queue = AdmissionQueue()

    async def generate(self, request: GenerationRequest) -> GenerationStream:
        """Open a stream; see `GenerationBackend.generate`.

        Requests that belong to admitted work skip the queue.
        """
        if request.is_admitted:
            return await self._offer(lambda: self._open(request))
        with self._refusals_counted():
            return await self._queue.run(lambda: self._offer(lambda: self._open(request)))

    async def _open(self, request: GenerationRequest) -> GenerationStream:
        """Return the stream that a replica has accepted.

        Raises:
            OverloadedError: The replica is full.
            RaystreamError: See `first_answer`.
        """
        responses = cast("Responses[GenerationEvent]", self._generate.remote(request))
        first = await first_answer(responses)
        assert isinstance(first, Accepted | Refused), f"got a {type(first).__name__}"
        self._replicas.hear(first)
        assert isinstance(first, Accepted), "`hear` raises a refusal"
        return HandleGenerationStream(responses, first)

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        """Ask a replica; see `GenerationBackend.tokenize`."""
        return cast("TokenizedPrompt", await self._call("tokenize", request))

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """Ask a replica; see `GenerationBackend.detokenize`."""
        return cast("str", await self._call("detokenize", token_ids))


class HandleGenerationStream:
    """A stream that a replica has accepted."""

    def __init__(self, responses: Responses[GenerationEvent], accepted: Accepted) -> None:
        """Take over the responses that follow the first event."""
        self.num_prompt_tokens = accepted.num_prompt_tokens
        self.reasoning = accepted.reasoning
        self._responses = responses
        self._ended = False

    def __aiter__(self) -> Self:
        """Return itself: a stream is read once."""
        return self

    async def __anext__(self) -> list[TextDelta]:
        """Return the deltas that have become ready since the last call."""
        try:
            with translated_errors():
                return cast("list[TextDelta]", await anext(self._responses))
        except (StopAsyncIteration, RaystreamError):
            self._ended = True
            raise

    async def aclose(self) -> None:
        """Cancel the replica's call unless it has ended."""
        if not self._ended:
            self._ended = True
            self._responses.cancel()
