"""How Serve scales the models, and where operators' wishes for them are written.

The wishes stand in the key-value store of Ray's control service, as `deployments.autoscaling` says.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put
from ray.serve.context import _get_global_client

from deployments import turns
from deployments.autoscaling import (
    NAMESPACE,
    LoadPolicy,
    WishKeys,
    ending_to_json,
    read_wishes,
)
from deployments.contract.errors import ModelConflictError, RaystreamError, ReplicaUnavailableError
from serve_app.backends.models.operator_actions import Scaling
from serve_app.backends.replicas.running_replicas import RunningReplicas

T = TypeVar("T")

logger = logging.getLogger("ray.serve.raystream.models")

TIMEOUT_S: Final = 5.0

SILENT: Final = "Ray's control plane does not answer"

NOTHING_CHANGED: Final = f"{SILENT}, so nothing was changed. Try again in a moment."

MAY_CHANGE: Final = (
    f"{SILENT}, so the change may come late or not at all. Try again in a moment, and look at "
    "GET /v1/models."
)

NOT_SCALED: Final = (
    "Serve scales no model now, because the file of this server is being deployed, or could not "
    "be; nothing was changed. Try again once it is deployed."
)

LOAD_POLICY: Final = f"{LoadPolicy.__module__}:{LoadPolicy.__name__}"

TURN_POLICY: Final = f"{turns.__name__}:{turns.TurnPolicy.__name__}"


class ServeScaling:
    """Serve's scaling of one application; see `ScalingControl`."""

    def __init__(self, application: str, replicas: Mapping[str, RunningReplicas]) -> None:
        """Note what is asked about.

        Args:
            application: The application's name.
            replicas: The replicas of each model, by the deployment's name.
        """
        self._application = application
        self._replicas = replicas

    async def scaling_of(self, deployment: str) -> Scaling:
        """Return how Serve scales a deployment."""
        return await _asked(lambda: self._scaling_of(deployment))

    async def pin(self, deployment: str) -> None:
        """Let a replica run in any case."""
        keys = self._keys(deployment)

        def pin() -> None:
            _internal_kv_put(keys.pin, b"1", namespace=NAMESPACE)
            # After the pin, so that an end that is written meanwhile does not outlive it.
            _internal_kv_del(keys.ending, namespace=NAMESPACE)

        await _asked(pin, MAY_CHANGE)

    async def unpin(self, deployment: str) -> None:
        """Let the load decide whether a replica runs."""
        key = self._keys(deployment).pin
        await _asked(lambda: _internal_kv_del(key, namespace=NAMESPACE), MAY_CHANGE)

    async def end(self, deployment: str) -> bool:
        """Let the replicas that run end once they have nothing to do; return whether any runs."""
        key, running = self._keys(deployment).ending, self._replicas[deployment].ids
        if running:
            value = ending_to_json(running)
            await _asked(lambda: _internal_kv_put(key, value, namespace=NAMESPACE), MAY_CHANGE)
        return bool(running)

    async def keep(self, deployment: str) -> None:
        """Let the replicas that were to end go on."""
        key = self._keys(deployment).ending
        await _asked(lambda: _internal_kv_del(key, namespace=NAMESPACE), MAY_CHANGE)

    def _keys(self, deployment: str) -> WishKeys:
        return WishKeys.of(self._application, deployment)

    def _scaling_of(self, deployment: str) -> Scaling:
        application = self._details()
        if deployment not in application.get("deployments", {}):
            raise ModelConflictError(NOT_SCALED)
        group = group_in(application, deployment)
        wishes = read_wishes(self._application, {deployment, *group})
        pinned = [name for name, wish in wishes.items() if wish.is_pinned]
        others = [each for each in group if each in pinned and each != deployment]
        has_room = turns.fit_together(group[each] for each in (deployment, *others) if group)
        return replace(
            scaling_in(application, deployment),
            is_pinned=deployment in pinned,
            pinned_rival=None if has_room or not others else others[0],
        )

    def _details(self) -> Mapping[str, Any]:
        """Return what Serve's controller says about the application."""
        client = _get_global_client(raise_if_no_controller_running=True)
        assert client is not None, "it raises"
        asked = client._controller.get_serve_instance_details.remote()
        found: Mapping[str, Any] = ray.get(asked, timeout=TIMEOUT_S)["applications"]
        application: Mapping[str, Any] = found.get(self._application, {})
        return application


def scaling_in(application: Mapping[str, Any], deployment: str) -> Scaling:
    """Return how Serve scales a deployment, whatever operators want.

    Args:
        application: What Serve's controller says about the application.
        deployment: The deployment's name.
    """
    config = application["deployments"][deployment]["deployment_config"]
    scaling = config.get("autoscaling_config")
    if scaling is None:
        return Scaling(config.get("num_replicas") or 1)
    policy = scaling.get("policy") or {}
    return Scaling(scaling.get("min_replicas", 1), policy.get("policy_function") == LOAD_POLICY)


def group_in(application: Mapping[str, Any], deployment: str) -> Mapping[str, float]:
    """Return the deployments that take turns with one, itself among them; none if it takes none.

    Each has the part of the device that it takes.

    Args:
        application: What Serve's controller says about the application.
        deployment: The deployment's name.
    """
    file = application.get("deployed_app_config") or {}
    policy = file.get("autoscaling_policy") or {}
    if policy.get("policy_function") == TURN_POLICY:
        for models in policy["policy_kwargs"]["groups"].values():
            parts = turns.parts_of(models)
            if deployment in parts:
                return parts
    return {}


async def _asked(ask: Callable[[], T], why: str = NOTHING_CHANGED) -> T:
    """Return an answer of Ray's control plane, whose calls block.

    Args:
        ask: Asks it. A call that has lasted too long goes on in its thread.
        why: What is said if it does not answer.

    Raises:
        ReplicaUnavailableError: It does not answer.
        RaystreamError: `ask` has raised it.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.to_thread(ask)
    except RaystreamError:
        raise
    except Exception as error:
        logger.warning("%s: %r", SILENT, error)
        raise ReplicaUnavailableError(why) from error
