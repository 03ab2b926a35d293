"""The memory and the replicas of all models, as an operator sees them.

Serve's controller and each replica are asked at most once a second, however many clients look. A
model without a replica is not asked, so it sleeps on.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from deployments.model_spec import Task
from serve_app.backends.replica_reports import AskReplicas, Reports
from serve_app.backends.serving_states import DeploymentState, ServingState, ServingStates
from serve_app.backends.single_flight import Remembered
from serve_app.config import ModelConfig

MEMORY_S: Final = 1.0
"""How long reports are passed on: replicas take a sample once a second."""


@dataclass(frozen=True, slots=True)
class DeviceSources:
    """Where the figures come from.

    Attributes:
        ask_replicas: By model id, a function that asks the model's replicas.
        now_s: Returns the time of a monotonic clock, in seconds.
    """

    ask_replicas: Mapping[str, AskReplicas] = field(default_factory=dict)
    now_s: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class ModelDevices:
    """One model.

    Attributes:
        id: The name that clients ask for.
        task: What it does.
        state: What Serve's controller tells of its deployment.
        replicas: What its replicas report.
    """

    id: str
    task: Task
    state: DeploymentState
    replicas: Reports


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

    async def _collect(self) -> tuple[ModelDevices, ...]:
        return tuple(await asyncio.gather(*map(self._ask, self._models)))

    async def _ask(self, model: ModelConfig) -> ModelDevices:
        state = await self._states.details_of(model.deployment_name)
        ask = self._sources.ask_replicas.get(model.id)
        is_any_running = state.serving is ServingState.RUNNING
        reports = Reports() if ask is None else await ask(is_any_running)
        return ModelDevices(model.id, model.task, state, reports)
