"""Makes the tests' own process look like a replica of Serve."""

from collections.abc import Iterator
from contextlib import contextmanager

from ray.serve import context
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.config import DeploymentConfig
from ray.serve.schema import ReplicaRank


@contextmanager
def as_replica(deployment: str) -> Iterator[None]:
    """Be a replica of a deployment for a while: `@serve.batch` reads the replica's limits."""
    context._set_internal_replica_context(
        replica_id=ReplicaID("tests", DeploymentID(deployment, "tests")),
        servable_object=object,
        _deployment_config=DeploymentConfig(max_ongoing_requests=512),
        rank=ReplicaRank(rank=0, node_rank=0, local_rank=0),
        world_size=1,
    )
    try:
        yield
    finally:
        context._INTERNAL_REPLICA_CONTEXT = None  # type: ignore[assignment] # as Ray starts
