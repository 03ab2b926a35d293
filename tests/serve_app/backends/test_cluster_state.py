import pytest
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatusOverview,
)

from serve_app.backends.cluster_state import down_in


@pytest.mark.parametrize(
    ("status", "states", "is_down"),
    [
        (DeploymentStatus.HEALTHY, {ReplicaState.RUNNING: 2}, False),
        (DeploymentStatus.HEALTHY, {}, False),  # asleep: Serve wants no replica
        (DeploymentStatus.UNHEALTHY, {ReplicaState.STARTING: 1}, True),
        (DeploymentStatus.UNHEALTHY, {ReplicaState.RUNNING: 1, ReplicaState.STARTING: 1}, False),
        (DeploymentStatus.UPDATING, {}, True),
        (DeploymentStatus.UPSCALING, {ReplicaState.STARTING: 1}, True),
        (DeploymentStatus.DEPLOY_FAILED, {ReplicaState.RUNNING: 0}, True),
    ],
)
def test_a_deployment_that_should_serve_and_has_no_running_replica_is_down(
    status: DeploymentStatus, states: dict[ReplicaState, int], is_down: bool
) -> None:
    deployment = DeploymentStatusOverview(
        status=status,
        status_trigger=DeploymentStatusTrigger.UNSPECIFIED,
        replica_states=states,
        message="",
    )
    application = ApplicationStatusOverview(
        status=ApplicationStatus.RUNNING,
        message="",
        last_deployed_time_s=0,
        deployments={"m": deployment},
    )
    assert down_in(application) == ({"m"} if is_down else frozenset())
