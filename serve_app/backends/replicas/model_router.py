"""Serve's router for a model: it prefers replicas that have run the beginning of a prompt.

It also writes down which replicas run, and respects versions and drains.

Serve names it in a deployment's `request_router_config`, copies this module by value into each
process that calls the deployment, and runs it in a thread of its own. So the module holds no state.
"""

import random

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from deployments.contract.generation import GenerationRequest
from serve_app.backends.replicas.prefix_memory import prefix_keys
from serve_app.backends.replicas.running_replicas import (
    ReplicaFacts,
    RunningReplicas,
    running_replicas_of,
)

PATH = "serve_app.backends.replicas.model_router:ModelRouter"
"""How a deployment names it."""


class ModelRouter(PowerOfTwoChoicesRequestRouter):
    """Takes the replica that has run the most of a prompt's beginning, unless it is too busy.

    Else it takes the less busy of two that suit a request.
    """

    @property
    def _running(self) -> RunningReplicas:
        return running_replicas_of(self._deployment_id.app_name, self._deployment_id.name)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note which replicas run; called at each change."""
        self._running.replace(_facts_of(each) for each in replicas)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Note that a replica is gone, before the controller says so."""
        super().on_replica_actor_died(replica_id)
        self._running.replace(_facts_of(each) for each in self._replicas.values())

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas to try: first the one that has run the prompt's beginning, if any."""
        suiting = list(self.apply_locality_routing(pending_request))
        two = random.sample(suiting, min(2, len(suiting)))
        first: list[ReplicaID] = []
        request = _request_of(pending_request)
        if request is not None and len(suiting) > 1:
            loads = {e.unique_id: self._replica_queue_len_cache.get(e) or 0 for e in suiting}
            chosen = self._running.prefixes.choose(prefix_keys(request), loads)
            first = [each for each in suiting if each.unique_id == chosen]
        ranks = [rank for rank in (first, two) if rank]
        return [[self._replicas[each] for each in rank] for rank in ranks]

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
    request = _request_of(pending_request)
    return None if request is None else request.fingerprint


def _request_of(pending_request: PendingRequest | None) -> GenerationRequest | None:
    """Return the request for a text that a call makes; None for other calls."""
    if pending_request is None:
        return None
    requests = (each for each in pending_request.args if isinstance(each, GenerationRequest))
    return next(requests, None)
