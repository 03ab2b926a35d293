from collections.abc import Iterator

import pytest
from ray.serve import context
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.config import DeploymentConfig
from ray.serve.schema import ReplicaRank


@pytest.fixture(autouse=True, scope="package")
def replica_context() -> Iterator[None]:
    """Let the process pass for a replica: `@serve.batch` asks for its limits."""
    context._set_internal_replica_context(
        replica_id=ReplicaID("tests", DeploymentID("tiny", "tests")),
        servable_object=object,
        _deployment_config=DeploymentConfig(max_ongoing_requests=512),
        rank=ReplicaRank(rank=0, node_rank=0, local_rank=0),
        world_size=1,
    )
    yield
    context._INTERNAL_REPLICA_CONTEXT = None  # type: ignore[assignment] # as Ray starts
