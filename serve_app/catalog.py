"""The models that are served, by the names that clients ask for.

Asks each backend what it serves and remembers the answer for the requests that follow. Whether a
model is ready is asked anew each time: replicas die and load again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from deployments.contract import ModelDescription
from deployments.errors import ModelNotFoundError, RaystreamError, ReplicaUnavailableError
from serve_app.backends import GenerationBackend
from serve_app.single_flight import SingleFlight

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that can be asked, and what it can do."""

    backend: GenerationBackend
    description: ModelDescription


class ModelCatalog:
    """Finds a model by its name."""

    def __init__(
        self, backends: Mapping[str, GenerationBackend], probe_timeout_s: float = 5.0
    ) -> None:
        """Keep the backends.

        Args:
            backends: At least one, by model id; the first is the default model.
            probe_timeout_s: How long `probe`, `ready` and `health` wait for a replica.
        """
        self._backends = dict(backends)
        self._descriptions: dict[str, ModelDescription] = {}
        self._probe_timeout_s = probe_timeout_s
        # Both are asked without a key, so by anybody and as often as they like.
        self._readiness = SingleFlight(lambda: self._outcomes(self.probe))
        self._health = SingleFlight(lambda: self._outcomes(self._ping))

    @property
    def default_id(self) -> str:
        """The model of a request that names none."""
        return next(iter(self._backends))

    async def get(self, model_id: str) -> ServedModel:
        """Return a model; wait while it loads.

        Raises:
            ModelNotFoundError: No model has this name.
            RaystreamError: The model can't be reached.
        """
        description = self._descriptions.get(model_id)
        if description is None:
            return await self._ask(model_id)
        return ServedModel(self._backends[model_id], description)

    async def probe(self, model_id: str) -> ServedModel:
        """Return a model that is ready now, or nearly so.

        Raises:
            ModelNotFoundError: No model has this name.
            ReplicaUnavailableError: No replica has the model loaded.
            RaystreamError: The model can't be reached.
        """
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                return await self._ask(model_id)
        except TimeoutError:
            raise ReplicaUnavailableError(f"The model {model_id!r} is loading.") from None

    async def ready(self) -> dict[str, ServedModel | RaystreamError]:
        """Return, for each model, itself if it is ready, else what stands in the way."""
        return await self._readiness.result()

    async def health(self) -> dict[str, RaystreamError | None]:
        """Return, for each model, None if its engine answers, else what is wrong."""
        return await self._health.result()

    async def _ask(self, model_id: str) -> ServedModel:
        backend = self._backends.get(model_id)
        if backend is None:
            names = ", ".join(self._backends)
            raise ModelNotFoundError(
                f"The model {model_id[:128]!r} is not served here. Served: {names}.", "model"
            )
        self._descriptions[model_id] = await backend.describe()
        return ServedModel(backend, self._descriptions[model_id])

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
