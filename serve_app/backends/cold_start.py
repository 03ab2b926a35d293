"""Models without a running replica: requests wake them and wait, and questions leave them asleep.

A request that finds no replica is admitted or refused at once. Then it waits, and its call to Serve
makes the controller start a replica. A client that reads a stream is told so from time to time.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

from deployments.contract import (
    Classification,
    ClassificationRequest,
    ClassifierDescription,
    GenerationRequest,
    ModelDescription,
    TokenizedPrompt,
    TokenizeRequest,
)
from deployments.errors import OverloadedError
from serve_app.backends.classification import ClassificationBackend
from serve_app.backends.generation import GenerationBackend, GenerationStream
from serve_app.backends.running_replicas import RunningReplicas
from serve_app.backends.serving_states import ServingState
from serve_app.http.access_record import current_record
from serve_app.http.notice import NOTICE_INTERVAL_S, loading

DescriptionT = TypeVar("DescriptionT")

RETRY_AFTER_S: Final = 5.0
"""When to come back after too many requests wait for a replica: by then one may run."""

POLL_INTERVAL_S: Final = 1.0
"""How often a model that loads is looked at again."""


class ColdStart(Generic[DescriptionT]):
    """The requests that wait while no replica of a model runs."""

    def __init__(
        self,
        model_id: str,
        replicas: RunningReplicas,
        state: Callable[[], Awaitable[ServingState]],
        describe_files: Callable[[], Awaitable[DescriptionT]],
        max_num_held: int,
        notice_interval_s: float = NOTICE_INTERVAL_S,
    ) -> None:
        """Start without requests.

        Args:
            model_id: The model.
            replicas: Its replicas.
            state: Returns the state of its deployment.
            describe_files: Describes the model without loading it.
            max_num_held: The most requests that wait for a replica; further ones are refused.
            notice_interval_s: Seconds between two notices to a client.
        """
        self._model_id = model_id
        self._replicas = replicas
        self._state = state
        self._describe_files = describe_files
        self._max_num_held = max_num_held
        self._notice_interval_s = notice_interval_s
        self._num_held = 0
        self._described: DescriptionT | None = None

    @property
    def is_cold(self) -> bool:
        """Whether no replica is known to run."""
        return not self._replicas.has_any

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold a place among the requests that wait, if no replica runs, during the block.

        Raises:
            OverloadedError: Too many requests wait already.
        """
        if not self.is_cold:
            yield
            return
        if self._num_held >= self._max_num_held:
            raise OverloadedError(
                f"The model {self._model_id!r} is being loaded, and {self._num_held} requests wait "
                f"for it, as many as it admits. Try again in {RETRY_AFTER_S:g} s.",
                None,
                RETRY_AFTER_S,
            )
        self._num_held += 1
        telling = asyncio.ensure_future(self._tell())
        try:
            yield
        finally:
            self._num_held -= 1
            telling.cancel()

    async def _tell(self) -> None:
        """Tell the client how long it has waited, until a replica runs."""
        record = current_record()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while self.is_cold and record is not None:
            record.on_notice(loading(self._model_id, loop.time() - began_s))
            await asyncio.sleep(self._notice_interval_s)

    async def describe(self, ask: Callable[[], Awaitable[DescriptionT]]) -> DescriptionT:
        """Return what the model can do, without waking it; wait while it loads.

        Args:
            ask: Asks a replica.

        Raises:
            OverloadedError: See `held`.
            RaystreamError: The replica could not answer.
        """
        state = await self._state()
        if state is ServingState.DOWN:
            async with self.held():
                while (state := await self._state()) is ServingState.DOWN:  # noqa: ASYNC110 - another process's state
                    await asyncio.sleep(POLL_INTERVAL_S)
        if state is ServingState.RUNNING:
            return await ask()
        if self._described is None:
            self._described = await self._describe_files()
        return self._described

    async def ping(self, ping: Callable[[], Awaitable[None]]) -> None:
        """Exercise a replica, unless the model is asleep.

        Raises:
            RaystreamError: It is not healthy, or no replica could answer.
        """
        if await self._state() is not ServingState.ASLEEP:
            await ping()


class ColdStartGenerationBackend:
    """A model that generates, and may have no replica."""

    def __init__(self, backend: GenerationBackend, start: ColdStart[ModelDescription]) -> None:
        self._backend = backend
        self._start = start

    async def generate(self, request: GenerationRequest) -> GenerationStream:
        """Open a stream; see `GenerationBackend.generate` and `ColdStart.held`."""
        async with self._start.held():
            return await self._backend.generate(request)

    async def describe(self) -> ModelDescription:
        """Return what the model can do; see `ColdStart.describe`."""
        return await self._start.describe(self._backend.describe)

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        """Return a prompt's tokens; see `GenerationBackend.tokenize`."""
        async with self._start.held():
            return await self._backend.tokenize(request)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of tokens; see `GenerationBackend.detokenize`."""
        async with self._start.held():
            return await self._backend.detokenize(token_ids)

    async def ping(self) -> None:
        """Exercise a replica's engine; see `ColdStart.ping`."""
        await self._start.ping(self._backend.ping)


class ColdStartClassificationBackend:
    """A classifier that may have no replica."""

    def __init__(
        self, backend: ClassificationBackend, start: ColdStart[ClassifierDescription]
    ) -> None:
        self._backend = backend
        self._start = start

    async def classify(self, request: ClassificationRequest) -> tuple[Classification, ...]:
        """Return the classification of each text; see `ClassificationBackend.classify`."""
        async with self._start.held():
            return await self._backend.classify(request)

    async def describe(self) -> ClassifierDescription:
        """Return what the model can do; see `ColdStart.describe`."""
        return await self._start.describe(self._backend.describe)

    async def ping(self) -> None:
        """Exercise a replica's device worker; see `ColdStart.ping`."""
        await self._start.ping(self._backend.ping)
