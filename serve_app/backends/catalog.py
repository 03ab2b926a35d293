"""The models that are served, by the names that clients ask for.

Each model has one task: it generates text, or it classifies it. Asks each backend what it serves
and remembers the answer for the requests that follow. Whether a model is ready is asked anew each
time: replicas die and load again.
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
from serve_app.backends import GenerationBackend
from serve_app.classification_backend import ClassificationBackend
from serve_app.single_flight import SingleFlight

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
    """The models of one task; what they once said of themselves is remembered."""

    def __init__(self, asks: Mapping[str, Callable[[], Awaitable[T]]]) -> None:
        """Keep, for each model's id, how to ask what it is."""
        self._asks = dict(asks)
        self._known: dict[str, T] = {}

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids, that of the default model first."""
        return iter(self._asks)

    def __contains__(self, model_id: str) -> bool:
        """Tell whether this is one of the ids."""
        return model_id in self._asks

    async def get(self, model_id: str) -> T:
        """Return a model; wait while it loads."""
        known = self._known.get(model_id)
        return await self.ask(model_id) if known is None else known

    async def ask(self, model_id: str) -> T:
        """Return a model as it is now."""
        self._known[model_id] = await self._asks[model_id]()
        return self._known[model_id]


class ModelCatalog:
    """Finds a model by its name."""

    def __init__(
        self,
        backends: Mapping[str, GenerationBackend],
        classifiers: Mapping[str, ClassificationBackend] = MappingProxyType({}),
        probe_timeout_s: float = 5.0,
    ) -> None:
        """Keep the backends.

        Args:
            backends: Of the models that generate, by model id; the first is their default.
            classifiers: Of those that classify, alike.
            probe_timeout_s: How long `probe`, `ready` and `health` wait for a replica.
        """
        self._backends: dict[str, GenerationBackend | ClassificationBackend]
        self._backends = {**backends, **classifiers}
        self._generating = TaskModels({i: partial(_generating, backends[i]) for i in backends})
        self._classifying = TaskModels(
            {i: partial(_classifying, classifiers[i]) for i in classifiers}
        )
        self._probe_timeout_s = probe_timeout_s
        # Both are asked without a key, so by anybody and as often as they like.
        self._readiness = SingleFlight(lambda: self._outcomes(self.probe))
        self._health = SingleFlight(lambda: self._outcomes(self._ping))

    async def get(self, model_id: str | None) -> ServedModel:
        """Return a model that generates, the first if none is named; wait while it loads.

        Raises:
            ModelNotFoundError: No model has this name.
            WrongTaskError: The model classifies.
            RaystreamError: The model can't be reached.
        """
        id_ = self._resolve(model_id, self._generating, "generate text")
        return await self._generating.get(id_)

    async def get_classifier(self, model_id: str | None) -> ServedClassifier:
        """Return a model that classifies, the first if none is named; wait while it loads.

        Raises:
            ModelNotFoundError: No model has this name.
            WrongTaskError: The model generates.
            RaystreamError: The model can't be reached.
        """
        id_ = self._resolve(model_id, self._classifying, "classify")
        return await self._classifying.get(id_)

    async def probe(self, model_id: str) -> ServedModel | ServedClassifier:
        """Return a model that is ready now, or nearly so.

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
        """Get to know every model as soon as it is loaded; who can't be reached is left out."""
        await self._outcomes(self._get)

    async def _get(self, model_id: str) -> ServedModel | ServedClassifier:
        if model_id in self._generating:
            return await self._generating.get(model_id)
        return await self._classifying.get(model_id)

    async def ready(self) -> dict[str, ServedModel | ServedClassifier | RaystreamError]:
        """Return, for each model, itself if it is ready, else what stands in the way."""
        return await self._readiness.result()

    async def health(self) -> dict[str, RaystreamError | None]:
        """Return, for each model, None if its engine answers, else what is wrong."""
        return await self._health.result()

    def _resolve(self, model_id: str | None, able: TaskModels[T], task: str) -> str:
        """Return the id of a model of a task, of its default model if None."""
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
