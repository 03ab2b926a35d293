"""The memory and the replicas of all models, as an operator sees them.

Serve's controller and each replica are asked at most once a second, however many clients look. A
model without a replica is not asked, so it sleeps on.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from deployments.contract.descriptions import Task
from deployments.contract.model_spec import ModelConfig
from deployments.contract.telemetry.start_progress import StartReport
from deployments.plan.replica_report import SleepState
from serve_app.backends.models.serving_states import (
    NOT_READY,
    DeploymentState,
    ServingState,
    ServingStates,
)
from serve_app.backends.models.single_flight import Remembered
from serve_app.backends.replicas.replica_reports import AskReplicas, Reports

STARTING: Final = "STARTING"
"""Serve's word for replicas that have not started yet."""

START_TIMEOUT_S: Final = 1.0
"""How long Ray's control service has to tell how far replicas are."""

ReadStarts = Callable[[], Awaitable[Mapping[str, tuple[StartReport, ...]]]]

MEMORY_S: Final = 1.0
"""How long reports are passed on: replicas take a sample once a second."""


@dataclass(frozen=True, slots=True)
class DeviceSources:
    """Where the figures come from.

    Attributes:
        ask_replicas: By model id, a function that asks the model's replicas.
        now_s: Returns the time of a monotonic clock, in seconds.
        read_starts: Returns how far starting replicas are, by deployment; it may take long.
    """

    ask_replicas: Mapping[str, AskReplicas] = field(default_factory=dict)
    now_s: Callable[[], float] = time.monotonic
    read_starts: ReadStarts | None = None


@dataclass(frozen=True, slots=True)
class ModelDevices:
    """One model.

    Attributes:
        id: The name that clients ask for.
        task: What it does.
        state: What Serve's controller tells of its deployment.
        replicas: What its replicas report.
        is_asked: Whether there is a way to ask them.
        starting: How far those are that have not started yet.
        adapter_ids: Its adapters, whose requests its replicas answer.
    """

    id: str
    task: Task
    state: DeploymentState
    replicas: Reports
    is_asked: bool = True
    starting: tuple[StartReport, ...] = ()
    adapter_ids: tuple[str, ...] = ()

    @property
    def sleeps_lightly(self) -> bool:
        """Whether replicas run, and none that answers holds the model's weights."""
        sleeps = [each.light_sleep for each in self.replicas.reports]
        return bool(sleeps) and all(
            each is not None and each.state is SleepState.ASLEEP for each in sleeps
        )

    @property
    def serving(self) -> ServingState:
        """The state, where a model that sleeps lightly is asleep, too."""
        is_running = self.state.serving is ServingState.RUNNING
        return ServingState.ASLEEP if is_running and self.sleeps_lightly else self.state.serving

    @property
    def failure(self) -> str | None:
        """Why the latest deploy has failed, or does not apply as a whole; None if it has not."""
        refused = (each.refused_user_config for each in self.replicas.reports)
        why = next(filter(None, refused), None)
        return self.state.failure or (None if why is None else f"user_config: {why}")

    @property
    def is_ready(self) -> bool:
        """Whether a replica answers, or the model has none only because of its load."""
        if self.state.serving in NOT_READY:
            return False
        is_silent = self.is_asked and not self.replicas.reports
        return not (self.state.serving is ServingState.RUNNING and is_silent)


class Devices:
    """Collects what the controller and the replicas tell."""

    def __init__(
        self, models: Sequence[ModelConfig], states: ServingStates, sources: DeviceSources
    ) -> None:
        """Start without reports.

        Args:
            models: The models, in the order of the answer.
            states: The states of their deployments.
            sources: Where the figures come from.
        """
        self._models = models
        self._states = states
        self._sources = sources
        self._reports = Remembered(self._collect, MEMORY_S, sources.now_s)

    async def latest(self) -> tuple[ModelDevices, ...]:
        """Return each model with its replicas, as they were at most a second ago."""
        return await self._reports.result()

    async def light_sleepers(self) -> frozenset[str]:
        """Return the ids of the models that sleep lightly; ask no replica if none ever does."""
        if not any(model.may_sleep_lightly for model in self._models):
            return frozenset()
        return frozenset(each.id for each in await self.latest() if each.sleeps_lightly)

    async def failure(self) -> str | None:
        """Return why the latest deploy has failed, of the file or of some models; None if not."""
        told = {
            model.failure if model.state.concerns_file else f"{model.id}: {model.failure}": None
            for model in await self.latest()
            if model.failure is not None
        }
        return "; ".join(told) or None

    async def _collect(self) -> tuple[ModelDevices, ...]:
        found = await asyncio.gather(*map(self._ask, self._models))
        if not any(each.state.num_replicas.get(STARTING) for each in found):
            return tuple(found)
        starts = await self._starts()
        names = [model.deployment_name for model in self._models]
        return tuple(
            replace(each, starting=starts.get(name, ()))
            for each, name in zip(found, names, strict=True)
        )

    async def _starts(self) -> Mapping[str, tuple[StartReport, ...]]:
        """Return how far starting replicas are; nothing if that can't be read in time."""
        if self._sources.read_starts is None:
            return {}
        try:
            return await asyncio.wait_for(self._sources.read_starts(), START_TIMEOUT_S)
        except TimeoutError:
            return {}

    async def _ask(self, model: ModelConfig) -> ModelDevices:
        state = await self._states.of(model.deployment_name)
        ask = self._sources.ask_replicas.get(model.id)
        reports = Reports() if ask is None else await ask(state.serving is ServingState.RUNNING)
        if ask is not None and _is_doubtful(state, reports):
            state = await self._states.newest_of(model.deployment_name)
            if _is_doubtful(state, reports) and not reports.silent:
                reports = await ask(True)
        return ModelDevices(
            model.id,
            model.task,
            state,
            reports,
            is_asked=ask is not None,
            adapter_ids=tuple(adapter.id for adapter in model.adapters),
        )


def _is_doubtful(state: DeploymentState, reports: Reports) -> bool:
    """Return whether no replica answers of a model of which the controller says that one runs.

    Its word may be a second old: the last replica may have been stopped meanwhile. And a router may
    hear of the first one a moment after the controller.
    """
    return state.serving is ServingState.RUNNING and not reports.reports
