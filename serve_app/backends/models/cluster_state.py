"""Questions to Ray's control plane, which no stream waits for.

Which nodes are about to stop, and which state a replica is in, only private functions of Ray tell:
Serve's controller asks the first itself, and the dashboard shows the second.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import ray
from ray import serve
from ray._raylet import GcsClient  # type: ignore[attr-defined] # a compiled module without stubs
from ray.exceptions import RayError
from ray.serve._private.common import (
    DeploymentStatus,
    DeploymentStatusInfo,
    DeploymentStatusTrigger,
    ReplicaState,
)
from ray.serve.context import _get_global_client
from ray.serve.generated.serve_pb2 import (  # type: ignore[attr-defined] # generated code
    DeploymentStatusInfo as DeploymentStatusInfoProto,
)
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatusOverview,
    ServeApplicationSchema,
)

from deployments.autoscaling import read_wishes
from deployments.turns import read_holder
from serve_app.backends.models.serving_states import DEPLOY_FAILED, DeploymentState, ServingState
from serve_app.backends.replicas.replica_departures import ServeReplicas
from serve_app.backends.replicas.running_replicas import RunningReplicas
from serve_app.placement import Demand

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


async def serve_replicas(app: str, deployment: str, turn_group: str | None = None) -> ServeReplicas:
    """Return what Serve's controller says about the replicas of a deployment.

    Args:
        app: The application.
        deployment: The deployment.
        turn_group: The light group of its model, if any: while another model has the turn, none of
            this one's replicas can go on with a stream, though Serve keeps them.

    Raises:
        Exception: The controller or Ray's control service does not answer, as while it is
            restarted.
    """
    return await asyncio.to_thread(_serve_replicas, app, deployment, turn_group)


def _serve_replicas(app: str, deployment: str, turn_group: str | None) -> ServeReplicas:
    client = _get_global_client(raise_if_no_controller_running=True)
    assert client is not None, "it raises"
    asked = client._controller.get_serve_instance_details.remote()
    details = ray.get(asked, timeout=TIMEOUT_S)
    application = details["applications"].get(app, {})
    found = application.get("deployments", {}).get(deployment, {})
    is_kept = bool(found) and found.get("status_trigger") != DeploymentStatusTrigger.DELETING
    holder = None if turn_group is None else read_holder(app, turn_group)
    is_turn_over = holder not in (None, deployment)
    return ServeReplicas(
        {
            each["replica_id"]: str(getattr(each["state"], "value", each["state"]))
            for each in found.get("replicas", ())
        },
        is_any_wanted=not is_kept or (found.get("target_num_replicas") != 0 and not is_turn_over),
    )


def deployed_files(*, has_to_answer: bool = False) -> Sequence[ServeApplicationSchema]:
    """Return the applications of the files that have been deployed last.

    Serve passes a builder only the `args:` of its application. Nothing is returned if there is no
    controller, or it does not answer: what it would help to check is then not checked.

    Raises:
        RayError: It does not answer, and `has_to_answer`. Serve calls a builder again after that.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return ()
    try:
        found = ray.get(client._controller.get_app_configs.remote(), timeout=TIMEOUT_S)
    except RayError as error:
        logger.warning("Serve's controller did not tell what is deployed: %s", error)
        if has_to_answer:
            raise
        return ()
    return tuple(found.values())


def running_demands() -> Mapping[str, Sequence[Demand]]:
    """Return what the replicas of the applications that run reserve, by application.

    As many replicas count as Serve wants now. Nothing is returned if the controller does not
    answer, and an application that is being built has none.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return {}
    try:
        asked = client._controller.get_serve_instance_details.remote()
        details = ray.get(asked, timeout=TIMEOUT_S)
    except RayError as error:
        logger.warning("Serve's controller did not tell what runs: %s", error)
        return {}
    return {
        name: [_demand_of(*each) for each in application.get("deployments", {}).items()]
        for name, application in details["applications"].items()
    }


def _demand_of(name: str, details: Mapping[str, Any]) -> Demand:
    config = details["deployment_config"]
    options = config.get("ray_actor_options") or {}
    num_bundled = sum(each.get("GPU", 0.0) for each in config.get("placement_group_bundles") or ())
    num_cpus = options.get("num_cpus")
    return Demand(
        name,
        int(details.get("target_num_replicas") or 0),
        1.0 if num_cpus is None else float(num_cpus),  # Ray's default
        num_bundled or float(options.get("num_gpus") or 0.0),
        is_spread=num_bundled > 0,
    )


async def deployment_states(
    application: str, replicas: Mapping[str, RunningReplicas]
) -> Mapping[str, DeploymentState]:
    """Return the state of each deployment of an application, and of each model.

    While a file is built, and from then on if that fails, Serve names no deployment of the
    application, although it keeps the replicas of the earlier file alive. The controller is then
    asked for each model by name, and whether one has a replica, Serve's routers know.

    Args:
        application: The application's name.
        replicas: The replicas of each model, by the deployment's name.

    Raises:
        Exception: The controller can't be reached.
    """
    # Serve's public call blocks.
    status = await asyncio.to_thread(serve.status)
    overview = status.applications.get(application)
    states = {} if overview is None else dict(states_in(overview))
    unnamed = sorted(replicas.keys() - states.keys())
    if unnamed:
        found = await asyncio.to_thread(_statuses_of, application, unnamed)
        failure = None if overview is None else _failure_of(overview)
        for name, info in zip(unnamed, found, strict=True):
            states[name] = unnamed_state(info, len(replicas[name].ids), failure)
    wishes = await asyncio.to_thread(read_wishes, application, sorted(replicas))
    return states | {
        name: replace(
            states[name],
            is_pinned=wish.is_pinned,
            is_going_to_sleep=not wish.ending.isdisjoint(replicas[name].ids),
        )
        for name, wish in wishes.items()
    }


def _statuses_of(application: str, names: Sequence[str]) -> list[DeploymentStatusInfo | None]:
    """Return what the controller says about deployments, whatever it says about their application.

    None stands for a deployment that it does not know.
    """
    client = _get_global_client(raise_if_no_controller_running=True)
    assert client is not None, "it raises"
    asked = [client._controller.get_deployment_status.remote(name, application) for name in names]
    return [
        None
        if sent is None
        else DeploymentStatusInfo.from_proto(DeploymentStatusInfoProto.FromString(sent))
        for sent in ray.get(asked, timeout=TIMEOUT_S)
    ]


def _failure_of(application: ApplicationStatusOverview) -> str | None:
    """Return why an application could not be deployed; None if it could, or may yet be."""
    has_failed = application.status == ApplicationStatus.DEPLOY_FAILED
    return application.message if has_failed else None


def unnamed_state(
    info: DeploymentStatusInfo | None, num_replicas: int, failure: str | None
) -> DeploymentState:
    """Return the state of a deployment that Serve does not name among those of its application.

    Args:
        info: What the controller says about it all the same; None if it does not know it.
        num_replicas: Its running replicas.
        failure: Why the application could not be deployed; None if it is being built.
    """
    serving = ServingState.RUNNING if num_replicas else _state_without_replicas(info)
    counts = {ReplicaState.RUNNING.value: num_replicas} if num_replicas else {}
    if failure is None or serving is ServingState.FAILED:
        status, message = ("", "") if info is None else (str(info.status.value), info.message)
        return DeploymentState(serving, status, message, counts)
    if serving is ServingState.ASLEEP:  # Serve scales no model of such an application
        serving = ServingState.FAILED
    return DeploymentState(serving, DEPLOY_FAILED, failure, counts, concerns_file=True)


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
    return _state_without_replicas(deployment)


def _state_without_replicas(
    deployment: DeploymentStatusOverview | DeploymentStatusInfo | None,
) -> ServingState:
    if deployment is None:
        return ServingState.DOWN
    if (deployment.status, deployment.status_trigger) == FAILED_WAKE:
        return ServingState.FAILED
    return WITHOUT_REPLICAS.get(deployment.status, ServingState.DOWN)
