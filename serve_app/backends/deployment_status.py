"""What Serve's controller says about an application's deployments."""

import asyncio

from ray import serve
from ray.serve._private.common import DeploymentStatus, ReplicaState
from ray.serve.schema import ApplicationStatusOverview


async def down_deployments(application: str) -> frozenset[str]:
    """Return the deployments of an application that should serve now and have no running replica.

    One without replicas is asleep, not down, if Serve calls it healthy: it wants none then.

    Raises:
        RayError: The controller can't be reached.
    """
    # Serve's public call blocks.
    status = await asyncio.to_thread(serve.status)
    overview = status.applications.get(application)
    return frozenset() if overview is None else down_in(overview)


def down_in(overview: ApplicationStatusOverview) -> frozenset[str]:
    """Return the deployments that should serve now and have no running replica."""
    return frozenset(
        name
        for name, deployment in overview.deployments.items()
        if deployment.status != DeploymentStatus.HEALTHY
        and not deployment.replica_states.get(ReplicaState.RUNNING)
    )
