"""Questions to Ray's control plane, which no stream waits for.

Which nodes are about to stop, and which state a replica is in, only private functions of Ray tell:
Serve's controller asks the first itself, and the dashboard shows the second.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

import ray
from ray import serve
from ray._raylet import GcsClient  # type: ignore[attr-defined] # a compiled module without stubs
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

from serve_app.backends.running_replicas import RunningReplicas
from serve_app.backends.serving_states import DeploymentState, ServingState

logger = logging.getLogger("ray.serve")

WITHOUT_REPLICAS: Final[Mapping[DeploymentStatus, ServingState]] = {
    DeploymentStatus.HEALTHY: ServingState.ASLEEP,  # it wants none
    DeploymentStatus.UPSCALING: ServingState.SCALING,
    DeploymentStatus.DOWNSCALING: ServingState.SCALING,
    DeploymentStatus.DEPLOY_FAILED: ServingState.FAILED,
}
"""The states of deployments without a running replica, by Serve's status; others are down."""

FAILED_WAKE: Final = (
    DeploymentStatus.UNHEALTHY,
    DeploymentStatusTrigger.REPLICA_STARTUP_FAILED,
)
"""How Serve calls a deployment whose replica could not start after it had been scaled."""

POLL_INTERVAL_S: Final = 1.0
TIMEOUT_S: Final = 5.0


async def watch_draining_nodes(models: Sequence[RunningReplicas]) -> None:
    """Ask every second which nodes are about to stop, and tell it all models."""
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    has_failed = False
    while True:
        try:
            nodes = await asyncio.to_thread(client.get_draining_nodes, timeout=TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - serving goes on without Ray's control plane
            if not has_failed:
                logger.warning("Ray does not tell which nodes are about to stop: %s", error)
            has_failed = True
        else:
            has_failed = False
            for running in models:
                running.set_draining_nodes(frozenset(nodes))
        await asyncio.sleep(POLL_INTERVAL_S)


async def replica_states(app: str, deployment: str) -> Mapping[str, str]:
    """Return Serve's state of each replica of a deployment, by Serve's id.

    Raises:
        Exception: The controller does not answer, as while it is restarted.
    """
    return await asyncio.to_thread(_replica_states, app, deployment)


def _replica_states(app: str, deployment: str) -> Mapping[str, str]:
    client = _get_global_client(raise_if_no_controller_running=True)
    assert client is not None, "it raises"
    asked = client._controller.get_serve_instance_details.remote()
    details = ray.get(asked, timeout=TIMEOUT_S)
    deployments = details["applications"].get(app, {}).get("deployments", {})
    replicas = deployments.get(deployment, {}).get("replicas", ())
    return {
        each["replica_id"]: str(getattr(each["state"], "value", each["state"])) for each in replicas
    }


async def deployment_states(application: str) -> Mapping[str, DeploymentState]:
    """Return the state of each deployment of an application.

    Raises:
        RayError: The controller can't be reached.
    """
    # Serve's public call blocks.
    status = await asyncio.to_thread(serve.status)
    overview = status.applications.get(application)
    return {} if overview is None else states_in(overview)


def states_in(overview: ApplicationStatusOverview) -> Mapping[str, DeploymentState]:
    """Return the state of each deployment."""
    return {
        name: DeploymentState(
            _state_of(each),
            DeploymentStatus(each.status).value,
            each.message,
            # Serve's types promise members of the enumeration, but plain strings may come.
            {
                ReplicaState(state).value: number
                for state, number in each.replica_states.items()
                if number
            },
        )
        for name, each in overview.deployments.items()
    }


def _state_of(deployment: DeploymentStatusOverview) -> ServingState:
    if deployment.replica_states.get(ReplicaState.RUNNING):
        return ServingState.RUNNING
    if (deployment.status, deployment.status_trigger) == FAILED_WAKE:
        return ServingState.FAILED
    return WITHOUT_REPLICAS.get(deployment.status, ServingState.DOWN)
