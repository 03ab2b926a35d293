"""Whether Serve must see each request of this replica, for the sake of its autoscaling."""

from ray import serve
from ray.serve.exceptions import RayServeException

from deployments.autoscaling import LoadPolicy

LOAD_POLICY = f"{LoadPolicy.__module__}:{LoadPolicy.__name__}"


def is_scaled_by_calls() -> bool:
    """Return whether another policy than `LoadPolicy` scales this replica's deployment.

    Serve's own policy counts Serve's calls. `LoadPolicy` reads what the replicas report.
    """
    try:
        scaling = serve.get_replica_context()._deployment_config.autoscaling_config
    except RayServeException:  # Serve does not run this replica
        return False
    return scaling is not None and scaling.policy.policy_function != LOAD_POLICY
