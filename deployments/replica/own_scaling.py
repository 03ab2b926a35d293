"""What the file says of this replica's deployment, and an operator: who scales it, and its end."""

import asyncio
import logging
from typing import Any, Final

import ray
from ray import serve
from ray.serve._private.common import ReplicaState
from ray.serve._private.constants import DEFAULT_GRACEFUL_SHUTDOWN_TIMEOUT_S
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from deployments.autoscaling import LoadPolicy, read_wish

logger = logging.getLogger("ray.serve.raystream.replica")

ASK_TIMEOUT_S: Final = 5.0

LOAD_POLICY = f"{LoadPolicy.__module__}:{LoadPolicy.__name__}"


def is_scaled_by_calls() -> bool:
    """Return whether another policy than `LoadPolicy` scales this replica's deployment.

    Serve's own policy counts Serve's calls. `LoadPolicy` reads what the replicas report.
    """
    scaling = _autoscaling_config()
    return scaling is not None and scaling.policy.policy_function != LOAD_POLICY


def to_zero_delay_s() -> float | None:
    """Return after how long without use Serve ends the last replica, in seconds; None for never.

    None, too, if another policy than `LoadPolicy` scales the deployment: no other one reads whether
    a process that sleeps lightly is to stay.
    """
    scaling = _autoscaling_config()
    if scaling is None or scaling.min_replicas or scaling.policy.policy_function != LOAD_POLICY:
        return None
    delay_s = scaling.downscale_to_zero_delay_s
    return float(scaling.downscale_delay_s if delay_s is None else delay_s)


def _autoscaling_config() -> Any:
    """Return how Serve scales this replica's deployment; None if it does not."""
    try:
        return serve.get_replica_context()._deployment_config.autoscaling_config
    except RayServeException:  # Serve does not run this replica
        return None


def graceful_shutdown_timeout_s() -> float:
    """Return how long Serve lets what runs go on when it stops this replica, in seconds."""
    try:
        config = serve.get_replica_context()._deployment_config
    except RayServeException:  # Serve does not run this replica
        return DEFAULT_GRACEFUL_SHUTDOWN_TIMEOUT_S
    return float(config.graceful_shutdown_timeout_s)


def is_stopped() -> bool:
    """Return whether Serve stops this replica; False if its controller does not answer.

    Serve tells a replica by running its destructor on the event loop. This is for one whose
    constructor has not returned.
    """
    try:
        context = serve.get_replica_context()
        client = _get_global_client(raise_if_no_controller_running=True)
        assert client is not None, "it raises"
        asked = client._controller.get_serve_instance_details.remote()
        applications = ray.get(asked, timeout=ASK_TIMEOUT_S)["applications"]
        deployments = applications[context.app_name]["deployments"]
        states = {
            each["replica_id"]: each["state"]
            for each in deployments[context.deployment]["replicas"]
        }
    except Exception as error:  # noqa: BLE001 - any of Ray's, also while a file is deployed
        logger.info("whether Serve stops this replica can't be read: %r", error)
        return False
    state = states.get(context.replica_id.unique_id)
    return state is not None and ReplicaState(state) is ReplicaState.STOPPING


async def is_pinned() -> bool:
    """Return whether an operator has pinned this replica's model.

    While Ray's control service does not answer, it counts as pinned: what runs goes on.
    """
    try:
        context = serve.get_replica_context()
    except RayServeException:  # Serve does not run this replica
        return False
    try:
        wish = await asyncio.to_thread(read_wish, context.app_name, context.deployment)
    except Exception as error:  # noqa: BLE001 - any of Ray's; the model goes on
        logger.warning("%s: whether it is pinned can't be read: %r", context.deployment, error)
        return True
    return wish.is_pinned
