"""The models of an application, as every process reaches them that is not one of their replicas.

The ingress and `raystream.Model` share this, so requests have the same failover, limits and
priorities by either way. `HandleModels` calls the replicas through Serve's handles; `catalog_of`
wraps the models to outlive replicas, to start from none, and to keep time limits.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from deployments.contract.claims import FairShares
from deployments.contract.descriptions import Task
from deployments.contract.errors import ReplicaUnavailableError
from deployments.contract.gen_ai_spans import ModelSpans
from deployments.contract.model_spec import ModelSpec
from serve_app.backends.models.adapters import with_adapters
from serve_app.backends.models.catalog import ModelCatalog
from serve_app.backends.models.cluster_state import (
    deployment_states,
    serve_replicas,
    watch_draining_nodes,
)
from serve_app.backends.models.cold_start import ColdStart
from serve_app.backends.models.model_files import FileDescriptions
from serve_app.backends.models.serving_states import (
    AskStates,
    DeploymentState,
    ServingState,
    ServingStates,
)
from serve_app.backends.models.single_flight import SingleFlight
from serve_app.backends.replicas.backend import Backend
from serve_app.backends.replicas.handle_backend import HandleBackend
from serve_app.backends.replicas.handles import Handle
from serve_app.backends.replicas.replica_departures import Departures
from serve_app.backends.replicas.replica_errors import NoReplicaError
from serve_app.backends.replicas.running_replicas import RunningReplicas, running_replicas_of
from serve_app.backends.streams.deadlines import Deadlines
from serve_app.backends.streams.failover import Failover
from serve_app.backends.streams.parking import ParkingLot
from serve_app.backends.streams.retries import FailoverLimits
from serve_app.config import AppConfig


@dataclass(frozen=True, slots=True)
class ApplicationDescription:
    """What a process needs to know of an application to reach its models.

    Attributes:
        config: The whole configuration.
        specs: What the replicas know of the models.
    """

    config: AppConfig
    specs: tuple[ModelSpec, ...]


class ServedModels:
    """Describes the models of an application that has no ingress of ours, as a Serve deployment.

    A graph of other deployments binds it to have the models deployed with it.
    """

    def __init__(
        self, config: AppConfig, handles: Mapping[str, Handle], specs: Sequence[ModelSpec]
    ) -> None:
        """Note what is served.

        Args:
            config: The whole configuration.
            handles: One for each model id; Serve deploys what they lead to.
            specs: What the replicas know of the models.
        """
        self._description = ApplicationDescription(config, tuple(specs))

    async def describe_application(self) -> ApplicationDescription:
        """Return what another process needs to reach the models."""
        return self._description


async def _no_description(model_id: str) -> Any:
    raise ReplicaUnavailableError(f"The model {model_id!r} sleeps, and nothing describes it.")


@dataclass(frozen=True, slots=True)
class ModelBackends:
    """The models of an application.

    Attributes:
        config: The models' entries, and the limits.
        generators: A backend for each model that generates, by its id; the first is their default.
        classifiers: The same for each model that classifies.
        embedders: The same for each model that embeds.
        replicas: The replicas of each model that may have none; others count as running.
        departures: Says which replicas of a model are about to end, by the model's id.
        shares: What the tenants of a model that generates got through here, by the model's id.
        describe_files: Describes a model that sleeps, by its id.
    """

    config: AppConfig
    generators: Mapping[str, Backend]
    classifiers: Mapping[str, Backend] = field(default_factory=dict)
    embedders: Mapping[str, Backend] = field(default_factory=dict)
    replicas: Mapping[str, RunningReplicas] = field(default_factory=dict)
    departures: Mapping[str, Departures] = field(default_factory=dict)
    shares: Mapping[str, FairShares] = field(default_factory=dict)
    describe_files: Callable[[str], Coroutine[Any, Any, Any]] = _no_description


@dataclass(frozen=True, slots=True, kw_only=True)
class HandleModels(ModelBackends):
    """The models of an application behind Serve's handles.

    Attributes:
        handles: The same backends as above, of all models.
        running: The replicas of every model.
        ask_states: Asks for the states of the deployments.
        watches: Coroutines that run for as long as requests are made.
    """

    handles: Sequence[HandleBackend]
    running: Mapping[str, RunningReplicas]
    ask_states: AskStates
    watches: Sequence[Callable[[], Coroutine[Any, Any, None]]]

    @classmethod
    def of(
        cls,
        config: AppConfig,
        handles: Mapping[str, Handle],
        specs: Sequence[ModelSpec],
        application: str,
        spans_of: Callable[[str], ModelSpans | None] = lambda id_: None,
    ) -> Self:
        """Wrap the handles.

        Args:
            config: The whole configuration.
            handles: One for each model id.
            specs: What the replicas know of models that may sleep. Their deployments have our
                router, which tells whether a replica runs.
            application: The application's name.
            spans_of: Returns what starts the spans of a model's calls, by the model's id.
        """
        running = {
            id_: running_replicas_of(handle.app_name, handle.deployment_name)
            for id_, handle in handles.items()
        }
        tasks = {model.id: model.task for model in config.models}
        turn_groups = {spec.id: spec.turn_group for spec in specs}
        departures = {
            id_: Departures(
                running[id_],
                # Many streams are lost at once.
                SingleFlight(
                    partial(
                        serve_replicas,
                        handle.app_name,
                        handle.deployment_name,
                        turn_groups.get(id_),
                    )
                ).result,
            )
            for id_, handle in handles.items()
            if tasks[id_] == "generate"
        }
        backends = {
            id_: HandleBackend(handle, running[id_], spans_of(id_), config.limits.priority_aging_s)
            for id_, handle in handles.items()
        }

        def those_that(task: Task) -> Mapping[str, HandleBackend]:
            return {id_: each for id_, each in backends.items() if tasks[id_] == task}

        return cls(
            config,
            those_that("generate"),
            those_that("classify"),
            those_that("embed"),
            {spec.id: running[spec.id] for spec in specs},
            departures,
            {id_: each.shares for id_, each in backends.items()},
            FileDescriptions({spec.id: spec for spec in specs}).of,
            handles=tuple(backends.values()),
            running=running,
            ask_states=partial(
                deployment_states,
                application,
                {handle.deployment_name: running[id_] for id_, handle in handles.items()},
            ),
            watches=(
                partial(watch_draining_nodes, tuple(running.values())),
                *(each.run for each in departures.values()),
            ),
        )

    async def aclose(self) -> None:
        """Close the channels to all replicas; streams that are still open fail."""
        await asyncio.gather(*(each.aclose() for each in self.handles))


def catalog_of(backends: ModelBackends, states: ServingStates) -> ModelCatalog:
    """Return the catalog of models, each wrapped to outlive replicas and to keep time limits.

    Args:
        backends: The models.
        states: The states of their deployments.
    """
    config, limits = backends.config, backends.config.limits
    failover = FailoverLimits(limits.failover_timeout_s)
    models = {model.id: model for model in config.models}

    starts: dict[str, ColdStart] = {}

    async def why_none(id_: str) -> NoReplicaError | None:
        state = await states.of(models[id_].deployment_name)
        is_failed = state.serving is ServingState.FAILED
        return NoReplicaError.of(id_, state.failure) if is_failed else None

    def outliving(id_: str, backend: Backend, *, generates: bool) -> Backend:
        shares, departures = backends.shares.get(id_), backends.departures.get(id_)
        lot = ParkingLot(limits.max_parked, limits.priority_aging_s, shares) if generates else None
        backend = Failover(backend, failover, partial(why_none, id_), departures, lot)
        if id_ in backends.replicas:
            backend = starts[id_] = ColdStart(
                backend,
                id_,
                backends.replicas[id_],
                partial(states.of, models[id_].deployment_name),
                partial(states.newest_of, models[id_].deployment_name),
                partial(backends.describe_files, id_),
                models[id_].max_num_admitted,
            )
        return Deadlines(backend, limits, generates=generates)

    def all_of(found: Mapping[str, Backend], *, generates: bool = False) -> dict[str, Backend]:
        return {id_: outliving(id_, each, generates=generates) for id_, each in found.items()}

    # An adapter's replicas are its model's.
    parents = {each.id: model.id for model in config.models for each in model.adapters}

    def is_cold(id_: str) -> bool:
        start = starts.get(parents.get(id_, id_))
        return start is not None and start.is_cold

    async def state_of(id_: str) -> DeploymentState:
        model = models.get(parents.get(id_, id_))
        return await states.of(id_ if model is None else model.deployment_name)

    return ModelCatalog(
        with_adapters(all_of(backends.generators, generates=True), config.models),
        all_of(backends.classifiers),
        all_of(backends.embedders),
        is_cold=is_cold,
        state_of=state_of,
        light_sleepers=[model.id for model in config.models if model.may_sleep_lightly],
    )
