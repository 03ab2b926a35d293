"""What an operator may do to a model: wake it, put it to sleep, pin it.

Serve's controller decides how many replicas run, by the policy that runs inside it. So a pin and a
wish to sleep are written where that policy reads them (`deployments.autoscaling`). To wake a model
takes no more than a request that waits for a replica.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from deployments.contract.errors import ModelConflictError, RaystreamError
from deployments.contract.model_spec import ModelConfig
from serve_app.backends.models.catalog import ModelCatalog
from serve_app.backends.models.serving_states import DeploymentState, ServingState, ServingStates

logger = logging.getLogger("ray.serve.raystream.models")
"""Below Serve's logger, which writes it to the replica's file and to the terminal."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How Serve scales a model, by the file that is deployed and by what operators want.

    Attributes:
        min_replicas: The least number of replicas; the number itself if Serve does not scale it.
        has_load_policy: Whether `LoadPolicy` does, which reads what operators want.
        is_pinned: Whether an operator has pinned it.
        pinned_rival: A pinned deployment that takes turns with it, if it doesn't fit on the device
            beside all that are pinned; None if it does.
    """

    min_replicas: int = 1
    has_load_policy: bool = False
    is_pinned: bool = False
    pinned_rival: str | None = None


class ScalingControl(Protocol):
    """Serve's scaling, as the actions see it; each method names a deployment.

    A pin and an end are apart, so that no action undoes a simultaneous one. A pin goes before an
    end, and takes back the one that was there.

    Each raises `ReplicaUnavailableError` if Ray's control plane does not answer.
    """

    async def scaling_of(self, deployment: str) -> Scaling:
        """Return how Serve scales it."""
        ...

    async def pin(self, deployment: str) -> None:
        """Let a replica run in any case."""
        ...

    async def unpin(self, deployment: str) -> None:
        """Let the load decide whether a replica runs."""
        ...

    async def end(self, deployment: str) -> bool:
        """Let the replicas that run end once they have nothing to do; return whether any runs."""
        ...

    async def keep(self, deployment: str) -> None:
        """Let the replicas that were to end go on."""
        ...


class FixedModels:
    """Models that nothing scales; see `ScalingControl`."""

    async def scaling_of(self, deployment: str) -> Scaling:
        """Return that a replica always runs."""
        return Scaling()

    async def pin(self, deployment: str) -> None:
        """Do nothing: the model runs in any case."""

    async def unpin(self, deployment: str) -> None:
        """Do nothing: the model runs in any case."""

    async def end(self, deployment: str) -> bool:
        """Do nothing: the model runs in any case."""
        return True

    async def keep(self, deployment: str) -> None:
        """Do nothing: the model runs in any case."""


class OperatorActions:
    """Does what operators ask for."""

    def __init__(
        self,
        models: Sequence[ModelConfig],
        catalog: ModelCatalog,
        states: ServingStates,
        control: ScalingControl | None = None,
    ) -> None:
        """Note whom to ask.

        Args:
            models: The models of the configuration.
            catalog: The same, to ask them.
            states: The states of their deployments.
            control: Serve's scaling; None: nothing scales the models.
        """
        self._deployments = {model.id: model.deployment_name for model in models}
        self._light_sleepers = {
            model.deployment_name for model in models if model.may_sleep_lightly
        }
        # An adapter's replicas are its model's.
        self._deployments |= {
            adapter.id: model.deployment_name for model in models for adapter in model.adapters
        }
        self._catalog = catalog
        self._states = states
        self._control = control or FixedModels()
        self._waking: dict[str, asyncio.Task[None]] = {}

    async def wake(self, model_id: str, *, waits: bool = False) -> DeploymentState:
        """Wake a model that sleeps, lightly or not, and let one that shall sleep go on running.

        Args:
            model_id: The model, or one of its adapters.
            waits: Whether to return only once a replica runs.

        Raises:
            ModelNotFoundError: No model has this name.
            RaystreamError: It was waited for, and can't be started; or Serve has given it up.
        """
        deployment = self._deployment_of(model_id)
        await self._control.keep(deployment)
        if self._catalog.is_cold(model_id) or deployment in self._light_sleepers:
            task = self._wake(model_id, deployment)
            # Of a model that has failed, the answer is there at once.
            if waits or (await self._states.of(deployment)).serving is ServingState.FAILED:
                await asyncio.shield(task)
        # What the controller said may be a second old.
        serving = ServingState.SCALING if self._catalog.is_cold(model_id) else ServingState.RUNNING
        state = await self._states.of(deployment)
        return replace(state, serving=serving, is_going_to_sleep=False)

    def _wake(self, model_id: str, deployment: str) -> asyncio.Task[None]:
        """Ask a replica to wake, and start one if none runs, unless that is under way."""
        task = self._waking.get(deployment)
        if task is None:
            task = self._waking[deployment] = asyncio.create_task(self._catalog.wake(model_id))
            task.add_done_callback(lambda ended: self._note_end(deployment, ended))
        return task

    def _note_end(self, deployment: str, task: asyncio.Task[None]) -> None:
        del self._waking[deployment]
        if not task.cancelled() and (error := task.exception()) is not None:
            is_ours = isinstance(error, RaystreamError)
            logger.warning(
                "%s could not be woken: %s", deployment, error, exc_info=None if is_ours else error
            )

    async def sleep(self, model_id: str) -> DeploymentState:
        """Let a model's replicas end as soon as none of them has anything to do.

        Args:
            model_id: The model, or one of its adapters.

        Raises:
            ModelNotFoundError: No model has this name.
            ModelConflictError: It must not sleep; the message says what to change.
            RaystreamError: Serve's controller can't be asked.
        """
        deployment = self._deployment_of(model_id)
        scaling = await self._control.scaling_of(deployment)
        if scaling.min_replicas > 0:
            raise ModelConflictError(
                f"The model {model_id!r} always runs: its least number of replicas is "
                f"{scaling.min_replicas}. To let it sleep, write min_replicas: 0 in the "
                "autoscaling_config of its deployment, and deploy again."
            )
        _require_load_policy(model_id, scaling)
        if scaling.is_pinned:
            raise ModelConflictError(
                f"The model {model_id!r} is pinned. Send POST /v1/models/{model_id}/unpin first."
            )
        state = await self._states.of(deployment)
        is_any_running = await self._control.end(deployment)
        if not is_any_running and state.serving is not ServingState.ASLEEP:
            raise ModelConflictError(
                f"The model {model_id!r} is {state.serving}, and no replica of it runs. Try again "
                "once one does."
            )
        return replace(state, is_going_to_sleep=is_any_running)

    async def pin(self, model_id: str) -> DeploymentState:
        """Keep a replica of a model running and awake, and start one if none runs.

        Args:
            model_id: The model, or one of its adapters.

        Raises:
            ModelNotFoundError: No model has this name.
            ModelConflictError: It can't be pinned; the message says what to change.
            RaystreamError: Serve's controller can't be asked.
        """
        deployment = self._deployment_of(model_id)
        scaling = await self._control.scaling_of(deployment)
        if scaling.min_replicas == 0:
            _require_load_policy(model_id, scaling)
        self._require_no_rival(model_id, scaling)
        await self._control.pin(deployment)
        if not scaling.is_pinned:
            try:  # two that take turns may be pinned at once
                self._require_no_rival(model_id, await self._control.scaling_of(deployment))
            except RaystreamError:
                await self._control.unpin(deployment)
                raise
        # A replica looks for a pin before it falls asleep, not while it sleeps.
        if deployment in self._light_sleepers and not self._catalog.is_cold(model_id):
            self._wake(model_id, deployment)
        state = await self._states.of(deployment)
        return replace(state, is_pinned=True, is_going_to_sleep=False)

    async def unpin(self, model_id: str) -> DeploymentState:
        """Let a model sleep again when nobody uses it, and take turns with others.

        Args:
            model_id: The model, or one of its adapters.

        Raises:
            ModelNotFoundError: No model has this name.
            RaystreamError: Serve's controller can't be asked.
        """
        deployment = self._deployment_of(model_id)
        await self._control.unpin(deployment)
        return replace(await self._states.of(deployment), is_pinned=False)

    def _require_no_rival(self, model_id: str, scaling: Scaling) -> None:
        """Raise `ModelConflictError` if a model that takes turns with this one is pinned."""
        if scaling.pinned_rival is not None:
            rival = self._model_of(scaling.pinned_rival)
            raise ModelConflictError(
                f"The models {model_id!r} and {rival!r} take turns, and {rival!r} is pinned. "
                f"Send POST /v1/models/{rival}/unpin first."
            )

    def _deployment_of(self, model_id: str) -> str:
        self._catalog.require_known(model_id)
        return self._deployments[model_id]

    def _model_of(self, deployment: str) -> str:
        return next(id_ for id_, name in self._deployments.items() if name == deployment)


def _require_load_policy(model_id: str, scaling: Scaling) -> None:
    if not scaling.has_load_policy:
        raise ModelConflictError(
            f"The policy that scales the model {model_id!r} does not read what operators want. "
            "Write policy: {policy_function: deployments.autoscaling:LoadPolicy} in the "
            "autoscaling_config of its deployment, and deploy again."
        )
