"""The models that are served, by the names that clients use.

Each model has one task: it generates text or classifies it. The catalog asks each backend what it
serves and remembers the answer for later requests. Readiness is never remembered: replicas die and
load again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Generic, TypeVar

from deployments.contract import ClassifierDescription, ModelDescription
from deployments.errors import (
    ModelNotFoundError,
    RaystreamError,
    ReplicaUnavailableError,
    WrongTaskError,
)
from serve_app.backends.classification import ClassificationBackend
from serve_app.backends.generation import GenerationBackend
from serve_app.backends.single_flight import SingleFlight

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that generates, and what it can do."""

    backend: GenerationBackend
    description: ModelDescription


@dataclass(frozen=True, slots=True)
class ServedClassifier:
    """A model that classifies, and what it can do."""

    backend: ClassificationBackend
    description: ClassifierDescription


class TaskModels(Generic[T]):
    """The models of one task, with remembered descriptions."""

    def __init__(self, asks: Mapping[str, Callable[[], Awaitable[T]]]) -> None:
        """Start without descriptions.

        Args:
            asks: By model id, a function that asks the model for its description.
        """
        self._asks = dict(asks)
        self._known: dict[str, T] = {}

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids, starting with the default model."""
        return iter(self._asks)

    def __contains__(self, model_id: str) -> bool:
        """Return whether this is one of the ids."""
        return model_id in self._asks

    async def get(self, model_id: str) -> T:
        """Return a model, remembered or asked; wait while it loads."""
        known = self._known.get(model_id)
        return await self.ask(model_id) if known is None else known

    async def ask(self, model_id: str) -> T:
        """Ask a model again, and remember the answer."""
        self._known[model_id] = await self._asks[model_id]()
        return self._known[model_id]


class ModelCatalog:
    """Finds a model by its name."""

    def __init__(
        self,
        backends: Mapping[str, GenerationBackend],
        classifiers: Mapping[str, ClassificationBackend] = MappingProxyType({}),
        probe_timeout_s: float = 5.0,
        is_cold: Callable[[str], bool] = lambda model_id: False,
    ) -> None:
        """Start without descriptions.

        Args:
            backends: Models that generate, by id; the first is their default.
            classifiers: Models that classify, by id; the first is their default.
            probe_timeout_s: How long `probe`, `ready` and `health` wait for a replica.
            is_cold: Returns whether no replica of a model is known to run.
        """
        self._backends: dict[str, GenerationBackend | ClassificationBackend]
        self._backends = {**backends, **classifiers}
        self._generating = TaskModels({i: partial(_generating, backends[i]) for i in backends})
        self._classifying = TaskModels(
            {i: partial(_classifying, classifiers[i]) for i in classifiers}
        )
        self._probe_timeout_s = probe_timeout_s
        self._is_cold = is_cold
        # Neither route needs a key, so any client may ask as often as it likes.
        self._readiness = SingleFlight(lambda: self._outcomes(self.probe))
        self._health = SingleFlight(lambda: self._outcomes(self._ping))

    async def get(self, model_id: str | None) -> ServedModel:
        """Return a model that generates, by default the first; wait while it loads.

        Raises:
            ModelNotFoundError: No model has this name.
            WrongTaskError: The model classifies.
            RaystreamError: The model can't be reached.
        """
        id_ = self._resolve(model_id, self._generating, "generate text")
        return await self._generating.get(id_)

    def is_cold(self, model_id: str | None) -> bool:
        """Return whether no replica is known to run of a model, by default the first generator."""
        id_ = next(iter(self._generating), None) if model_id is None else model_id
        return id_ in self._backends and self._is_cold(id_)

    async def get_classifier(self, model_id: str | None) -> ServedClassifier:
        """Return a model that classifies, by default the first; wait while it loads.

        Raises:
            ModelNotFoundError: No model has this name.
            WrongTaskError: The model generates.
            RaystreamError: The model can't be reached.
        """
        id_ = self._resolve(model_id, self._classifying, "classify")
        return await self._classifying.get(id_)

    async def probe(self, model_id: str) -> ServedModel | ServedClassifier:
        """Return a model that is ready within the probe's timeout.

        Raises:
            ModelNotFoundError: No model has this name.
            ReplicaUnavailableError: No replica has the model loaded.
            RaystreamError: The model can't be reached.
        """
        self._require(model_id)
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                if model_id in self._generating:
                    return await self._generating.ask(model_id)
                return await self._classifying.ask(model_id)
        except TimeoutError:
            raise ReplicaUnavailableError(f"The model {model_id!r} is loading.") from None

    async def get_all(self) -> None:
        """Ask every model for its description, waiting while it loads; skip those that fail."""
        await self._outcomes(self._get)

    async def _get(self, model_id: str) -> ServedModel | ServedClassifier:
        if model_id in self._generating:
            return await self._generating.get(model_id)
        return await self._classifying.get(model_id)

    async def ready(self) -> dict[str, ServedModel | ServedClassifier | RaystreamError]:
        """Return each model by id if it is ready, else the error that says why it is not."""
        return await self._readiness.result()

    async def health(self) -> dict[str, RaystreamError | None]:
        """Return, by model id, None if the model's engine answers, else the error."""
        return await self._health.result()

    def _resolve(self, model_id: str | None, able: TaskModels[T], task: str) -> str:
        """Return the id of a model that can do the task; None means the task's default model."""
        if model_id is not None:
            self._require(model_id)
        elif (model_id := next(iter(able), None)) is None:
            raise ModelNotFoundError(f"No model here can {task}.", "model")
        if model_id not in able:
            names = ", ".join(able) or "none"
            raise WrongTaskError(
                f"The model {model_id!r} can't {task}. Models that can: {names}.", "model"
            )
        return model_id

    def _require(self, model_id: str) -> None:
        if model_id not in self._backends:
            names = ", ".join(self._backends)
            raise ModelNotFoundError(
                f"The model {model_id[:128]!r} is not served here. Served: {names}.", "model"
            )

    async def _ping(self, model_id: str) -> None:
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                await self._backends[model_id].ping()
        except TimeoutError:
            raise ReplicaUnavailableError(f"The model {model_id!r} does not answer.") from None

    async def _outcomes(self, ask: Callable[[str], Awaitable[T]]) -> dict[str, T | RaystreamError]:
        async def outcome(model_id: str) -> T | RaystreamError:
            try:
                return await ask(model_id)
            except RaystreamError as error:
                return error

        outcomes = await asyncio.gather(*map(outcome, self._backends))
        return dict(zip(self._backends, outcomes, strict=True))


async def _generating(backend: GenerationBackend) -> ServedModel:
    return ServedModel(backend, await backend.describe())


async def _classifying(backend: ClassificationBackend) -> ServedClassifier:
    return ServedClassifier(backend, await backend.describe())
