"""Classifiers, as surfaces see them: a Protocol, and Ray Serve's handles behind it."""

from collections.abc import Callable
from typing import Protocol, cast

from deployments.contract import (
    Classification,
    ClassificationEvent,
    ClassificationRequest,
    Classified,
    ClassifierDescription,
    Refused,
)
from serve_app.backends.handles import (
    Handle,
    HandleBackend,
    Responses,
    first_answer,
    read_to_end,
)


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

    def __init__(self, handle: Handle, count_refusal: Callable[[], object] = lambda: None) -> None:
        """Wrap a model's handle; see `HandleBackend`."""
        super().__init__(handle, count_refusal)
        self._classify_suspect = handle.options(method_name="classify_suspect", stream=True)

    async def classify(self, request: ClassificationRequest) -> tuple[Classification, ...]:
        """Ask a replica; see `ClassificationBackend.classify`."""
        with self._refusals_counted():
            classified = await self._offer(lambda: self._classify(request))
        return classified.classifications

    async def _classify(self, request: ClassificationRequest) -> Classified:
        answer = await self._ask(request)
        self._replicas.hear(answer)
        assert isinstance(answer, Classified), "`hear` raises a refusal"
        return answer

    async def _ask(self, request: ClassificationRequest) -> Classified | Refused:
        if not request.num_deaths:
            return cast("Classified | Refused", await self._call("classify", request))
        call = self._classify_suspect.remote(request)
        responses = cast("Responses[ClassificationEvent]", call)
        answer = await first_answer(responses, self._channels)
        await read_to_end(responses)
        assert isinstance(answer, Classified | Refused), f"got a {type(answer).__name__}"
        return answer
