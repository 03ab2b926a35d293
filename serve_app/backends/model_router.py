"""Serve's router for a model: it writes down which replicas run, and respects versions and drains.

Serve names it in a deployment's `request_router_config`, copies this module by value into each
process that calls the deployment, and runs it in a thread of its own. So the module holds no state.
"""

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from deployments.contract import GenerationRequest
from serve_app.backends.running_replicas import (
    ReplicaFacts,
    RunningReplicas,
    running_replicas_of,
)

PATH = "serve_app.backends.model_router:ModelRouter"
"""How a deployment names it."""


class ModelRouter(PowerOfTwoChoicesRequestRouter):
    """Takes the less busy of two replicas that suit a request."""

    @property
    def _running(self) -> RunningReplicas:
        return running_replicas_of(self._deployment_id.app_name, self._deployment_id.name)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note which replicas run; called at each change, and when one is found dead."""
        self._running.replace(_facts_of(each) for each in replicas)
        super().update_replicas(replicas)

    def apply_locality_routing(
        self, pending_request: PendingRequest | None = None
    ) -> set[ReplicaID]:
        """Return the replicas to choose from: those that suit, or all if none does.

        One that does not suit says so itself. Returning none would make Ray's router spin.
        """
        candidates: set[ReplicaID] = super().apply_locality_routing(pending_request)
        running, fingerprint = self._running, _fingerprint_of(pending_request)
        return {each for each in candidates if running.suits(each.unique_id, fingerprint)} or (
            candidates
        )


def _facts_of(replica: RunningReplica) -> ReplicaFacts:
    fingerprint = replica.replica_metadata.get("fingerprint")
    return ReplicaFacts(replica.replica_id.unique_id, replica.node_id, fingerprint)


def _fingerprint_of(pending_request: PendingRequest | None) -> str | None:
    """Return the version that a request needs; None if any will do."""
    if pending_request is None:
        return None
    requests = (each for each in pending_request.args if isinstance(each, GenerationRequest))
    return next((each.fingerprint for each in requests), None)
