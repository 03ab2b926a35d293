from collections.abc import Mapping

import pytest
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatusOverview,
)

from serve_app.backends.cluster_state import states_in
from serve_app.backends.serving_states import ServingState


@pytest.mark.parametrize(
    ("status", "states", "expected"),
    [
        (DeploymentStatus.HEALTHY, {ReplicaState.RUNNING: 2}, ServingState.RUNNING),
        (DeploymentStatus.HEALTHY, {}, ServingState.ASLEEP),  # Serve wants no replica
        (DeploymentStatus.UNHEALTHY, {ReplicaState.STARTING: 1}, ServingState.DOWN),
        (
            DeploymentStatus.UNHEALTHY,
            {ReplicaState.RUNNING: 1, ReplicaState.STARTING: 1},
            ServingState.RUNNING,
        ),
        (DeploymentStatus.UPDATING, {}, ServingState.DOWN),
        (DeploymentStatus.UPSCALING, {ReplicaState.STARTING: 1}, ServingState.SCALING),
        (DeploymentStatus.DOWNSCALING, {ReplicaState.STOPPING: 1}, ServingState.SCALING),
        (DeploymentStatus.DEPLOY_FAILED, {ReplicaState.RUNNING: 0}, ServingState.FAILED),
    ],
)
def test_a_deployment_without_a_running_replica_is_down_if_it_should_have_one(
    status: DeploymentStatus, states: dict[ReplicaState, int], expected: ServingState
) -> None:
    assert states_of(status, states) == {"m": expected}


def test_a_wake_that_fails_has_failed() -> None:
    trigger = DeploymentStatusTrigger.REPLICA_STARTUP_FAILED
    found = states_of(DeploymentStatus.UNHEALTHY, {}, trigger)
    assert found == {"m": ServingState.FAILED}


def states_of(
    status: DeploymentStatus,
    states: dict[ReplicaState, int],
    trigger: DeploymentStatusTrigger = DeploymentStatusTrigger.UNSPECIFIED,
) -> Mapping[str, ServingState]:
    deployment = DeploymentStatusOverview(
        status=status, status_trigger=trigger, replica_states=states, message=""
    )
    application = ApplicationStatusOverview(
        status=ApplicationStatus.RUNNING,
        message="",
        last_deployed_time_s=0,
        deployments={"m": deployment},
    )
    return states_in(application)
