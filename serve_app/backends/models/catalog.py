"""The models that are served, by the names that clients use.

Each model has one task: it generates text, classifies texts or embeds them. The catalog asks each
backend what it serves and remembers the answer for later requests. Whether a model can be served is
never remembered: replicas die and load again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Generic, TypeGuard, TypeVar

from deployments.contract.descriptions import ModelDescription, PoolerDescription, Task
from deployments.contract.errors import (
    ModelNotFoundError,
    RaystreamError,
    ReplicaUnavailableError,
    WrongTaskError,
)
from serve_app.backends.models.serving_states import NOT_READY, DeploymentState, ServingState
from serve_app.backends.models.single_flight import SingleFlight
from serve_app.backends.replicas.backend import Backend, DescribeRequest, PingRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that generates, and what it can do."""

    backend: Backend
    description: ModelDescription


@dataclass(frozen=True, slots=True)
class ServedPooler:
    """A model that classifies or embeds, and what it can do."""

    backend: Backend
    description: PoolerDescription

    @property
    def can_compare(self) -> bool:
        """Whether it can say how well two texts fit: it embeds, or is a cross-encoder."""
        return self.description.embedding is not None or len(self.description.labels) == 1


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model of the configuration, whether or not it can be served now.

    Attributes:
        id: The name that clients ask for.
        task: What it does.
        state: Its state. A model whose replicas should run and don't answer is down.
        failure: Why Serve has given up on starting it; None unless it has.
        served: What it can do, as it was told last; None if it never was.
        is_pinned: Whether an operator wants a replica to run in any case.
    """

    id: str
    task: Task
    state: ServingState
    failure: str | None
    served: ServedModel | ServedPooler | None
    is_pinned: bool = False


async def _is_running(model_id: str) -> DeploymentState:
    return DeploymentState(ServingState.RUNNING)


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

    def known(self, model_id: str) -> T | None:
        """Return a model if it is remembered."""
        return self._known.get(model_id)

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
        backends: Mapping[str, Backend],
        classifiers: Mapping[str, Backend] = MappingProxyType({}),
        embedders: Mapping[str, Backend] = MappingProxyType({}),
        probe_timeout_s: float = 5.0,
        choice_timeout_s: float = 1.0,
        is_cold: Callable[[str], bool] = lambda model_id: False,
        state_of: Callable[[str], Awaitable[DeploymentState]] = _is_running,
        light_sleepers: Collection[str] = (),
    ) -> None:
        """Start without descriptions.

        Args:
            backends: Models that generate, by id; the first is their default.
            classifiers: Models that classify, by id; the first is their default.
            embedders: Models that embed, by id; the first is their default.
            probe_timeout_s: How long `probe`, `listed` and `health` wait for a replica.
            choice_timeout_s: How long `get_comparer` prefers a model that has not answered yet.
            is_cold: Returns whether no replica of a model is known to run.
            state_of: Returns the state of a model's deployment.
            light_sleepers: Ids of the models whose replicas may sleep lightly.
        """
        self._light_sleepers = frozenset(light_sleepers)
        self._backends = {**backends, **classifiers, **embedders}
        self._generating = TaskModels({i: partial(_generating, backends[i]) for i in backends})
        self._classifying = TaskModels({i: partial(_pooling, classifiers[i]) for i in classifiers})
        self._embedding = TaskModels({i: partial(_pooling, embedders[i]) for i in embedders})
        self._probe_timeout_s = probe_timeout_s
        self._choice_timeout_s = choice_timeout_s
        self._is_cold = is_cold
        self._state_of = state_of
        # Neither route needs a key, so any client may ask as often as it likes.
        self._listing = SingleFlight(self._list_all)
        self._health = SingleFlight(lambda: self._outcomes(self._ping))

    async def get(self, model_id: str | None) -> ServedModel:
        """Return a model that generates, by default the first; wait while it loads.

        Raises:
            ModelNotFoundError: No model has this name.
            WrongTaskError: The model does something else.
            RaystreamError: The model can't be reached.
        """
        id_ = self._resolve(model_id, self._generating, "generate text")
        return await self._generating.get(id_)

    def is_cold(self, model_id: str | None) -> bool:
        """Return whether no replica is known to run of a model, by default the first generator."""
        id_ = self._named(model_id)
        return id_ in self._backends and self._is_cold(id_)

    def may_wait(self, model_id: str | None) -> bool:
        """Return whether a request may have to wait until a model is loaded, or wakes."""
        return self._named(model_id) in self._light_sleepers or self.is_cold(model_id)

    def _named(self, model_id: str | None) -> str | None:
        return next(iter(self._generating), None) if model_id is None else model_id

    async def get_classifier(self, model_id: str | None) -> ServedPooler:
        """Return a model that classifies, by default the first; wait while it loads.

        Raises:
            ModelNotFoundError: No model has this name.
            WrongTaskError: The model does something else.
            RaystreamError: The model can't be reached.
        """
        id_ = self._resolve(model_id, self._classifying, "classify")
        return await self._classifying.get(id_)

    async def get_embedder(self, model_id: str | None) -> ServedPooler:
        """Return a model that embeds, by default the first; wait while it loads.

        Raises:
            ModelNotFoundError: No model has this name.
            WrongTaskError: The model does something else.
            RaystreamError: The model can't be reached.
        """
        id_ = self._resolve(model_id, self._embedding, "embed texts")
        return await self._embedding.get(id_)

    async def get_comparer(self, model_id: str | None) -> ServedPooler:
        """Return a model that compares texts; wait while it loads.

        By default that is the first cross-encoder, and without one the first that embeds. Models
        that load or fail are passed over if another compares texts.

        Raises:
            ModelNotFoundError: No model has this name, or none can compare texts.
            WrongTaskError: The model does something else.
            RaystreamError: The model can't be reached.
        """
        if model_id is None:
            return await self._default_comparer()
        self.require_known(model_id)
        if model_id not in self._generating:
            found = await self._pooler(model_id)
            if found.can_compare:
                return found
        names = ", ".join(self.comparer_ids) or "none"
        raise WrongTaskError(
            f"The model {model_id!r} can't compare texts. Models that can: {names}.", "model"
        )

    async def _default_comparer(self) -> ServedPooler:
        ids = (*self._classifying, *self._embedding)
        for id_ in ids:
            known = self._pooling_models(id_).known(id_)
            if known is None:
                break
            if known.can_compare:
                return known
        asks = [asyncio.ensure_future(_outcome(self._pooler, id_)) for id_ in ids]
        try:
            return await _first_comparer(asks, self._choice_timeout_s)
        finally:
            for ask in asks:
                ask.cancel()

    @property
    def comparer_ids(self) -> list[str]:
        """The models that compare texts, as far as that is known."""
        cross_encoders = [
            id_
            for id_ in self._classifying
            if (known := self._classifying.known(id_)) is not None and known.can_compare
        ]
        return [*cross_encoders, *self._embedding]

    async def _pooler(self, model_id: str) -> ServedPooler:
        return await self._pooling_models(model_id).get(model_id)

    def _pooling_models(self, model_id: str) -> TaskModels[ServedPooler]:
        return self._classifying if model_id in self._classifying else self._embedding

    def _models_of(self, model_id: str) -> TaskModels[ServedModel] | TaskModels[ServedPooler]:
        generates = model_id in self._generating
        return self._generating if generates else self._pooling_models(model_id)

    async def probe(self, model_id: str) -> ServedModel | ServedPooler:
        """Return a model that is ready within the probe's timeout.

        Raises:
            ModelNotFoundError: No model has this name.
            ReplicaUnavailableError: No replica has the model loaded.
            RaystreamError: The model can't be reached.
        """
        self.require_known(model_id)
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                return await self._models_of(model_id).ask(model_id)
        except TimeoutError:
            raise ReplicaUnavailableError(f"The model {model_id!r} is loading.") from None

    async def wake(self, model_id: str) -> None:
        """Wait for a replica of a model, which starts one if it sleeps.

        Raises:
            ModelNotFoundError: No model has this name.
            RaystreamError: None can be started, or too many requests wait for one.
        """
        self.require_known(model_id)
        await self._backends[model_id].send(PingRequest(wakes=True))

    async def get_all(self) -> None:
        """Ask every model for its description, waiting while it loads; skip those that fail."""
        await self._outcomes(self._get)

    async def _get(self, model_id: str) -> ServedModel | ServedPooler:
        return await self._models_of(model_id).get(model_id)

    async def listed(self) -> tuple[ListedModel, ...]:
        """Return all models, with what each can do if that is known; wait for none that loads."""
        return await self._listing.result()

    async def _list_all(self) -> tuple[ListedModel, ...]:
        return tuple(await asyncio.gather(*map(self._list, self._backends)))

    async def require(self, model_id: str) -> ListedModel:
        """Return a model that can be served.

        Raises:
            RaystreamError: See `probe`.
        """
        served = await self.probe(model_id)
        state = await self._state_of(model_id)
        task = self._task_of(model_id)
        return ListedModel(model_id, task, state.serving, None, served, state.is_pinned)

    async def _list(self, model_id: str) -> ListedModel:
        state = await self._state_of(model_id)
        serving, served = state.serving, self._models_of(model_id).known(model_id)
        if serving not in NOT_READY:
            try:
                served = await self.probe(model_id)
            except RaystreamError:
                serving = ServingState.DOWN
        failure = state.failure if serving is ServingState.FAILED else None
        task = self._task_of(model_id)
        return ListedModel(model_id, task, serving, failure, served, state.is_pinned)

    def _task_of(self, model_id: str) -> Task:
        if model_id in self._generating:
            return "generate"
        return "classify" if model_id in self._classifying else "embed"

    async def health(self) -> dict[str, RaystreamError | None]:
        """Return, by model id, None if the model's engine answers, else the error."""
        return await self._health.result()

    def _resolve(self, model_id: str | None, able: TaskModels[T], task: str) -> str:
        """Return the id of a model that can do the task; None means the task's default model."""
        if model_id is not None:
            self.require_known(model_id)
        elif (model_id := next(iter(able), None)) is None:
            raise ModelNotFoundError(f"No model here can {task}.", "model")
        if model_id not in able:
            names = ", ".join(able) or "none"
            raise WrongTaskError(
                f"The model {model_id!r} can't {task}. Models that can: {names}.", "model"
            )
        return model_id

    def require_known(self, model_id: str) -> None:
        """Return if a model has this name.

        Raises:
            ModelNotFoundError: None has.
        """
        if model_id not in self._backends:
            names = ", ".join(self._backends)
            raise ModelNotFoundError(
                f"The model {model_id[:128]!r} is not served here. Served: {names}.", "model"
            )

    async def _ping(self, model_id: str) -> None:
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                await self._backends[model_id].send(PingRequest())
        except TimeoutError:
            raise ReplicaUnavailableError(f"The model {model_id!r} does not answer.") from None

    async def _outcomes(self, ask: Callable[[str], Awaitable[T]]) -> dict[str, T | RaystreamError]:
        outcomes = await asyncio.gather(*(_outcome(ask, id_) for id_ in self._backends))
        return dict(zip(self._backends, outcomes, strict=True))


async def _outcome(ask: Callable[[str], Awaitable[T]], model_id: str) -> T | RaystreamError:
    try:
        return await ask(model_id)
    except RaystreamError as error:
        return error


async def _first_comparer(
    asks: Sequence[asyncio.Future[ServedPooler | RaystreamError]], timeout_s: float
) -> ServedPooler:
    """Return the first model that compares texts and answers in time, or else any that does.

    Raises:
        RaystreamError: None compares texts.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    for ask in asks:
        await asyncio.wait([ask], timeout=max(0.0, deadline_s - loop.time()))
        if ask.done() and _can_compare(found := ask.result()):
            return found
    for late in asyncio.as_completed(asks):
        if _can_compare(found := await late):
            return found
    failures = (found for ask in asks if isinstance(found := ask.result(), RaystreamError))
    raise next(failures, ModelNotFoundError("No model here can compare texts.", "model"))


def _can_compare(found: ServedPooler | RaystreamError) -> TypeGuard[ServedPooler]:
    return isinstance(found, ServedPooler) and found.can_compare


async def _generating(backend: Backend) -> ServedModel:
    description = await backend.send(DescribeRequest())
    assert isinstance(description, ModelDescription), "the file says that it generates"
    return ServedModel(backend, description)


async def _pooling(backend: Backend) -> ServedPooler:
    description = await backend.send(DescribeRequest())
    assert isinstance(description, PoolerDescription), "the file says that it does not generate"
    return ServedPooler(backend, description)
