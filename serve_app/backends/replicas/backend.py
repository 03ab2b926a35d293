"""What a model is to the server: requests go in by one method, whatever stands in between.

`handle_backend` asks replicas. Cold start, failover and deadlines each wrap a backend and are asked
in the same way, so a request passes any of them without a method of its own.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol, overload

from deployments.contract.descriptions import ModelDescription, PoolerDescription
from deployments.contract.generation import (
    Accepted,
    GenerationRequest,
    TokenizedPrompt,
    TokenizeRequest,
)
from deployments.contract.output import TextDelta
from deployments.contract.pooling import PooledText, PoolingRequest


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """Tokens whose text is asked for."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DescribeRequest:
    """Asks what the model can do, and waits while its replicas load."""


@dataclass(frozen=True, slots=True)
class PingRequest:
    """Exercises a replica's engine or device worker. The caller sets its own time limit."""


Request = (
    GenerationRequest
    | PoolingRequest
    | TokenizeRequest
    | DetokenizeRequest
    | DescribeRequest
    | PingRequest
)


class GenerationStream(Protocol):
    """The deltas of one accepted request."""

    @property
    def accepted(self) -> Accepted:
        """The answer of the first replica that accepted the request."""
        ...

    def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        """Iterate over lists of deltas: each holds all that became ready since the last.

        The iteration ends after a delta whose finish reason is `STOP` or `LENGTH`. In place of any
        other end it raises, unless the stream is closed: then it may end without a finish, which
        `Choices` takes for an error.

        Raises:
            GenerationAbortedError: The replica was stopped.
            GenerationFailedError: The sequence has failed.
            RaystreamError: The replica has failed.
        """
        ...

    async def aclose(self) -> None:
        """Abort the sequence unless it has ended; closing twice is harmless.

        A reader that waits for deltas gets a `ReplicaUnavailableError`, or its iteration ends.
        """
        ...


class Backend(Protocol):
    """One model, wherever it runs.

    It answers the requests of its own task, `DescribeRequest` and `PingRequest`.
    """

    @overload
    async def send(self, request: GenerationRequest) -> GenerationStream: ...
    @overload
    async def send(self, request: PoolingRequest) -> tuple[PooledText, ...]: ...
    @overload
    async def send(self, request: TokenizeRequest) -> TokenizedPrompt: ...
    @overload
    async def send(self, request: DetokenizeRequest) -> str: ...
    @overload
    async def send(self, request: DescribeRequest) -> ModelDescription | PoolerDescription: ...
    @overload
    async def send(self, request: PingRequest) -> None: ...
    async def send(self, request: Request) -> object:
        """Return the answer; a stream is open once a replica has accepted its request.

        Raises:
            RaystreamError: The request was refused or has failed, or no replica could take it.
        """
        ...
