"""The door between HTTP and a classifier: a Ray Serve handle behind a Protocol.

As `backends` is for models that generate, with the same words for Ray's errors.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

from ray.serve.handle import DeploymentHandle

from deployments.contract import (
    Classification,
    ClassificationRequest,
    Classified,
    ClassifierDescription,
    Refused,
)
from deployments.errors import OverloadedError, TotalTimeoutError
from serve_app.backends import Response, answer_of
from serve_app.deadlines import Deadline, arrival_s
from serve_app.known_replicas import KnownReplicas


class ClassificationBackend(Protocol):
    """One classifier, wherever it runs."""

    async def classify(self, request: ClassificationRequest) -> tuple[Classification, ...]:
        """Return what the model says of each text, in their order.

        Raises:
            RaystreamError: The request was refused, or no replica could take it.
        """
        ...

    async def describe(self) -> ClassifierDescription:
        """Return what the model can do. Waits while its replicas load.

        Raises:
            RaystreamError: No replica could answer.
        """
        ...

    async def ping(self) -> None:
        """Exercise a replica's device worker.

        Raises:
            RaystreamError: The worker is not well, or no replica could answer.
        """
        ...


class HandleClassificationBackend:
    """A classifier behind a Ray Serve handle."""

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        count_refusal: Callable[[], object] = lambda: None,
    ) -> None:
        """Keep the handle.

        Args:
            handle: The model's.
            count_refusal: Is called for each request that finds no room.
        """
        self._handle = handle
        self._replicas = KnownReplicas()
        self._count_refusal = count_refusal

    async def classify(self, request: ClassificationRequest) -> tuple[Classification, ...]:
        """Ask a replica; see `ClassificationBackend.classify`."""
        try:
            classified = await self._replicas.until_taken(lambda: self._classify(request))
        except OverloadedError:
            self._count_refusal()
            raise
        return classified.classifications

    async def _classify(self, request: ClassificationRequest) -> Classified:
        response = cast("Response", self._handle.classify.remote(request))
        answer = cast("Classified | Refused", await answer_of(response))
        self._replicas.hear(answer)
        assert isinstance(answer, Classified), "a refusal was raised"
        return answer

    async def describe(self) -> ClassifierDescription:
        """Ask a replica; see `ClassificationBackend.describe`."""
        response = cast("Response", self._handle.describe.remote())
        return cast("ClassifierDescription", await answer_of(response))

    async def ping(self) -> None:
        """Ask a replica; see `ClassificationBackend.ping`."""
        await answer_of(cast("Response", self._handle.ping.remote()))


class TimelyClassificationBackend:
    """A classifier that answers in time, or not at all; as `deadlines` is for texts."""

    def __init__(self, backend: ClassificationBackend, total_timeout_s: float | None) -> None:
        """Keep the model and the most seconds that an answer may take; None sets no limit."""
        self._backend = backend
        self._total_timeout_s = total_timeout_s

    async def classify(self, request: ClassificationRequest) -> tuple[Classification, ...]:
        """Return what the model says of each text; see `ClassificationBackend.classify`.

        Raises:
            TotalTimeoutError: The replica did not answer in time; its call was cancelled.
            RaystreamError: See `ClassificationBackend.classify`.
        """
        deadline = self._deadline(
            "The texts were not classified within {:g} s (limits.total_timeout_s). Send fewer of "
            "them, or shorter ones."
        )
        return await deadline.hold(self._backend.classify(request))

    async def describe(self) -> ClassifierDescription:
        """Return what the model can do; see `ClassificationBackend.describe`.

        Raises:
            TotalTimeoutError: No replica had the model loaded in time.
            RaystreamError: See `ClassificationBackend.describe`.
        """
        deadline = self._deadline(
            "The model was not loaded within {:g} s (limits.total_timeout_s). Try again later."
        )
        return await deadline.hold(self._backend.describe())

    async def ping(self) -> None:
        """Exercise a replica; whoever asks knows how long to wait."""
        await self._backend.ping()

    def _deadline(self, message: str) -> Deadline:
        """Return when an answer to this request is late."""
        return Deadline.after(arrival_s(), self._total_timeout_s, TotalTimeoutError, message)
