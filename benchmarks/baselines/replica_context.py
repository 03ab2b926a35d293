"""Makes a process look like a Serve replica, so that `@serve.batch` works without a cluster."""

from ray.serve import context
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.config import DeploymentConfig
from ray.serve.schema import ReplicaRank

MAX_ONGOING_REQUESTS = 100_000
"""`@serve.batch` reads this limit, to warn about batches that it can't fill."""


def pass_for_a_replica() -> None:
    """Set the context that Serve sets in a replica; Ray has no public way to do that."""
    context._set_internal_replica_context(
        replica_id=ReplicaID("benchmark", DeploymentID("classifier", "benchmarks")),
        servable_object=object,
        _deployment_config=DeploymentConfig(max_ongoing_requests=MAX_ONGOING_REQUESTS),
        rank=ReplicaRank(rank=0, node_rank=0, local_rank=0),
        world_size=1,
    )
