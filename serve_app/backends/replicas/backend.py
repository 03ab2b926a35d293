"""What a model is to the server: requests go in by one method, whatever stands in between.

`handle_backend` asks replicas. Cold start, failover and deadlines each wrap a backend and are asked
in the same way, so a request passes any of them without a method of its own.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from deployments.contract.descriptions import ModelDescription, PoolerDescription
from deployments.contract.generation import Request

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class DetokenizeRequest(Request[str]):
    """Tokens whose text is asked for."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DescribeRequest(Request[ModelDescription | PoolerDescription]):
    """Asks what the model can do, and waits while its replicas load."""


@dataclass(frozen=True, slots=True)
class PingRequest(Request[None]):
    """Exercises a replica's engine or device worker. The caller sets its own time limit.

    Attributes:
        wakes: Whether a model that sleeps is started for it, and a replica that sleeps lightly
            wakes.
    """

    wakes: bool = False


class Backend(Protocol):
    """One model, wherever it runs.

    It answers the requests of its own task, `DescribeRequest` and `PingRequest`.
    """

    async def send(self, request: Request[AnswerT]) -> AnswerT:
        """Return the answer; a stream is open once a replica has accepted its request.

        Raises:
            RaystreamError: The request was refused or has failed, or no replica could take it.
        """
        ...
