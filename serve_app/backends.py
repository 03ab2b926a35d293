"""The door between HTTP and the models: Ray Serve's handles behind a Protocol.

Ray's errors become ours here and nowhere else, and every stream that was opened is cancelled when
its reader stops early. Nothing above this module knows Ray.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, Self, cast

import grpc  # type: ignore[import-untyped] # ships no types
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.contract import (
    Accepted,
    GenerationEvent,
    GenerationRequest,
    InvalidParameterError,
    ModelDescription,
    Refused,
    TextDelta,
    TokenizedPrompt,
    TokenizeRequest,
)
from deployments.errors import (
    InvalidRequestError,
    OverloadedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from serve_app.known_replicas import KnownReplicas
from serve_app.opening_line import OpeningLine


class GenerationStream(Protocol):
    """The deltas of one accepted request."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, counted by the replica."""
        ...

    def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        """Iterate over lists of deltas: each holds all that were ready since the last.

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
            RaystreamError: The engine is not well, or no replica could answer.
        """
        ...


class Responses(Protocol):
    """What we need of Ray's `DeploymentResponseGenerator`."""

    def __aiter__(self) -> Self:
        """Return itself."""
        ...

    async def __anext__(self) -> list[GenerationEvent]:
        """Return what the replica yielded next."""
        ...

    def cancel(self) -> None:
        """Cancel the replica's call."""
        ...


class Response(Protocol):
    """What we need of Ray's `DeploymentResponse`."""

    def __await__(self) -> Generator[Any, None, object]:
        """Return what the replica returned."""
        ...

    def cancel(self) -> None:
        """Cancel the replica's call."""
        ...


class HandleGenerationBackend:
    """A model behind a Ray Serve handle."""

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        count_refusal: Callable[[], object] = lambda: None,
    ) -> None:
        """Keep the handle, and a second view of it that streams.

        Args:
            handle: The model's.
            count_refusal: Is called for each request that finds no room.
        """
        self._handle = handle
        self._generate = handle.options(method_name="generate", stream=True)
        self._replicas = KnownReplicas()
        self._line = OpeningLine()
        self._count_refusal = count_refusal

    async def generate(self, request: GenerationRequest) -> GenerationStream:
        """Open a stream; see `GenerationBackend.generate`."""
        if request.is_admitted:
            return await self._ask(request)
        try:
            return await self._line.run(lambda: self._ask(request))
        except OverloadedError:
            self._count_refusal()
            raise

    async def _ask(self, request: GenerationRequest) -> GenerationStream:
        return await self._replicas.until_taken(lambda: self._open(request))

    async def _open(self, request: GenerationRequest) -> GenerationStream:
        responses = cast("Responses", self._generate.remote(request))
        try:
            with our_errors():
                first = await anext(responses)
                if isinstance(first[0], Refused):
                    await anext(responses, None)  # so that Ray counts the call as ended
        except StopAsyncIteration:
            raise ReplicaUnavailableError("The model's replica gave no answer.") from None
        except BaseException:
            responses.cancel()
            raise
        return self._stream(responses, *first)

    def _stream(
        self, responses: Responses, first: GenerationEvent, *others: GenerationEvent
    ) -> GenerationStream:
        """Return the stream that a replica has opened with these events.

        Raises:
            OverloadedError: The replica is full.
        """
        assert not others, "the first event came in company"
        assert isinstance(first, Accepted | Refused), f"it was a {type(first).__name__}"
        self._replicas.hear(first)
        assert isinstance(first, Accepted), "a refusal was raised"
        return HandleGenerationStream(responses, first)

    async def describe(self) -> ModelDescription:
        """Ask a replica; see `GenerationBackend.describe`."""
        response = cast("Response", self._handle.describe.remote())
        return cast("ModelDescription", await answer_of(response))

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        """Ask a replica; see `GenerationBackend.tokenize`."""
        response = cast("Response", self._handle.tokenize.remote(request))
        return cast("TokenizedPrompt", await answer_of(response))

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """Ask a replica; see `GenerationBackend.detokenize`."""
        response = cast("Response", self._handle.detokenize.remote(token_ids))
        return cast("str", await answer_of(response))

    async def ping(self) -> None:
        """Ask a replica; see `GenerationBackend.ping`."""
        await answer_of(cast("Response", self._handle.ping.remote()))


class HandleGenerationStream:
    """A stream that a replica has accepted."""

    def __init__(self, responses: Responses, accepted: Accepted) -> None:
        """Take over the responses behind the first event."""
        self.num_prompt_tokens = accepted.num_prompt_tokens
        self._responses = responses
        self._ended = False

    def __aiter__(self) -> Self:
        """Return itself: a stream is read once."""
        return self

    async def __anext__(self) -> list[TextDelta]:
        """Return the deltas that have become ready since the last call."""
        try:
            with our_errors():
                return cast("list[TextDelta]", await anext(self._responses))
        except (StopAsyncIteration, RaystreamError):
            self._ended = True
            raise

    async def aclose(self) -> None:
        """Cancel the replica's call unless it has ended."""
        if not self._ended:
            self._ended = True
            self._responses.cancel()


async def answer_of(response: Response) -> object:
    """Wait for what a replica returns; cancel its call when that is no longer wanted.

    Raises:
        RaystreamError: The replica has failed, or can't be reached.
    """
    try:
        with our_errors():
            return await response
    except BaseException:
        response.cancel()
        raise


@contextmanager
def our_errors() -> Iterator[None]:
    """Raise our error in place of Ray's; leave the cancellation of this task alone.

    When a replica is told to stop, Ray lets its callers see `CancelledError` too. Nobody has
    cancelled them, so it is told apart by `Task.cancelling`.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ReplicaUnavailableError("The model's replica has cancelled the request.") from error
    except (StopAsyncIteration, TaskCancelledError):
        raise
    except Exception as error:
        # Whatever the replica's code may raise arrives here: wrapped by Ray, or bare over gRPC.
        ours = _our_error(error)
        if ours is error:
            raise
        raise ours from error


def _our_error(error: Exception) -> RaystreamError:
    """Return what the replica raised, if it is ours; else an error that tells nothing of it."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    match cause:
        case RaystreamError():
            return cause
        case InvalidParameterError():
            return InvalidRequestError(cause.message, cause.param)
        case BackPressureError():
            return OverloadedError("Too many requests wait for the model. Try again later.")
        case RayActorError() | DeploymentUnavailableError() | grpc.aio.AioRpcError():
            return ReplicaUnavailableError("The model's replica can't be reached.")
        case _:
            return RaystreamError("The model's replica failed at this request.")
