"""Models that outlive their replicas: streams go on elsewhere, and calls are repeated.

`failover_stream` moves a stream; `losses` decides what follows from a loss.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from deployments.contract.descriptions import ModelDescription, PoolerDescription
from deployments.contract.errors import (
    GenerationFailedError,
    PoolingFailedError,
    ReplicaUnavailableError,
)
from deployments.contract.generation import GenerationRequest, TokenizedPrompt, TokenizeRequest
from deployments.contract.pooling import PooledText, PoolingRequest
from serve_app.backends.replicas.generation import GenerationStream, ReplicaBackend
from serve_app.backends.replicas.pooling import PoolingBackend
from serve_app.backends.streams.failover_stream import FailoverStream
from serve_app.backends.streams.losses import AskWhy, FailoverLimits, Losses, may_run

T = TypeVar("T")

MAX_NUM_HAND_OVERS: Final = 16
"""Streams of one model that open at another replica at the same time, while theirs still runs."""


class FailoverGenerationBackend:
    """A model whose streams go on at another replica when theirs is lost."""

    def __init__(
        self, backend: ReplicaBackend, limits: FailoverLimits, why_none: AskWhy = may_run
    ) -> None:
        """Wrap a model.

        Args:
            backend: The model.
            limits: Limits on the search for another replica.
            why_none: See `Losses`.
        """
        self._backend = backend
        self._limits = limits
        self._why_none = why_none
        self._hand_overs = asyncio.Semaphore(MAX_NUM_HAND_OVERS)

    async def generate(self, request: GenerationRequest) -> GenerationStream:
        """Open a stream; see `GenerationBackend.generate`.

        Raises:
            GenerationFailedError: The request is taken for the cause of its replicas' deaths.
            RaystreamError: See `GenerationBackend.generate` and `Losses.until_taken`.
        """
        losses = Losses(
            self._limits,
            GenerationFailedError,
            why_none=self._why_none,
            is_accepted=request.is_admitted,
        )
        stream = await losses.until_taken(lambda: self._backend.generate(losses.noted_in(request)))
        losses.is_accepted = True
        return FailoverStream(
            self._backend, request, stream, losses, self._limits, self._hand_overs
        )

    async def describe(self) -> ModelDescription:
        """Return what the model can do; see `GenerationBackend.describe`."""
        return await _read(self._backend.describe, self._limits, self._why_none)

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        """Return a prompt's tokens; see `GenerationBackend.tokenize`."""
        return await _read(lambda: self._backend.tokenize(request), self._limits, self._why_none)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of tokens; see `GenerationBackend.detokenize`."""
        return await _read(
            lambda: self._backend.detokenize(token_ids), self._limits, self._why_none
        )

    async def ping(self) -> None:
        """Exercise a replica's engine; see `GenerationBackend.ping`."""
        await self._backend.ping()


class FailoverPoolingBackend:
    """A pooler whose requests are sent again when their replica is lost."""

    def __init__(
        self, backend: PoolingBackend, limits: FailoverLimits, why_none: AskWhy = may_run
    ) -> None:
        """Wrap a model; see `FailoverGenerationBackend`."""
        self._backend = backend
        self._limits = limits
        self._why_none = why_none

    async def pool(self, request: PoolingRequest) -> tuple[PooledText, ...]:
        """Return the row of each text; see `PoolingBackend.pool`.

        Raises:
            PoolingFailedError: See `Losses.add`.
            RaystreamError: See `PoolingBackend.pool` and `Losses.until_taken`.
        """
        losses = Losses(self._limits, PoolingFailedError, why_none=self._why_none, is_accepted=True)
        return await losses.until_taken(lambda: self._backend.pool(losses.noted_in(request)))

    async def describe(self) -> PoolerDescription:
        """Return what the model can do; see `PoolingBackend.describe`."""
        return await _read(self._backend.describe, self._limits, self._why_none)

    async def ping(self) -> None:
        """Exercise a replica's device worker; see `PoolingBackend.ping`."""
        await self._backend.ping()


async def _read(call: Callable[[], Awaitable[T]], limits: FailoverLimits, why_none: AskWhy) -> T:
    """Make a call that changes nothing, and once more if its replica dies.

    Raises:
        RaystreamError: See `Losses.add` and `Losses.until_taken`.
    """
    losses = Losses(limits, ReplicaUnavailableError, why_none=why_none, starts_at_once=True)
    return await losses.until_taken(call)
