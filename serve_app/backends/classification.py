"""Classifiers, as surfaces see them: a Protocol, and Ray Serve's handles behind it."""

from typing import Protocol, cast

from deployments.contract import (
    Classification,
    ClassificationRequest,
    Classified,
    ClassifierDescription,
    Refused,
)
from serve_app.backends.handles import HandleBackend


class ClassificationBackend(Protocol):
    """One classifier, wherever it runs."""

    async def classify(self, request: ClassificationRequest) -> tuple[Classification, ...]:
        """Return the classification of each text, in order.

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
            RaystreamError: The worker is not healthy, or no replica could answer.
        """
        ...


class HandleClassificationBackend(HandleBackend[ClassifierDescription]):
    """A classifier behind a Ray Serve handle; see `ClassificationBackend`."""

    async def classify(self, request: ClassificationRequest) -> tuple[Classification, ...]:
        """Ask a replica; see `ClassificationBackend.classify`."""
        with self._refusals_counted():
            classified = await self._offer(lambda: self._classify(request))
        return classified.classifications

    async def _classify(self, request: ClassificationRequest) -> Classified:
        answer = cast("Classified | Refused", await self._call("classify", request))
        self._replicas.hear(answer)
        assert isinstance(answer, Classified), "`hear` raises a refusal"
        return answer
