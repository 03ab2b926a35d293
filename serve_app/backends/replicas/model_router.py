"""Serve's router for a model: it prefers replicas that have run the beginning of a prompt.

It passes over replicas that have refused a request, respects versions and drains, and writes down
which replicas run.

Serve names it in a deployment's `request_router_config`, copies this module by value into each
process that calls the deployment, and runs it in a thread of its own. So the module holds no state.
"""

import random

from ray.serve._private.common import RequestMetadata
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from deployments.contract.generation import GenerationRequest
from deployments.contract.pooling import PoolingRequest
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
        if isinstance(request, GenerationRequest) and len(suiting) > 1:
            loads = {e.unique_id: self._replica_queue_len_cache.get(e) or 0 for e in suiting}
            chosen = self._running.prefixes.choose(prefix_keys(request), loads)
            first = [each for each in suiting if each.unique_id == chosen]
        ranks = [rank for rank in (first, two) if rank]
        return [[self._replicas[each] for each in rank] for rank in ranks]

    def apply_locality_routing(
        self, pending_request: PendingRequest | None = None
    ) -> set[ReplicaID]:
        """Return the replicas to choose from: those that suit and have not refused the request.

        Those that are near go before others. If none suits, one that has not refused says so
        itself; if all have refused, any does. Returning none would make Ray's router spin.
        """
        near: set[ReplicaID] = super().apply_locality_routing(pending_request)
        running, request = self._running, _request_of(pending_request)
        refused_by = frozenset[str]() if request is None else request.refused_by
        fingerprint = request.fingerprint if isinstance(request, GenerationRequest) else None
        others = {each for each in self._replicas if each.unique_id not in refused_by}
        suiting = {each for each in others if running.suits(each.unique_id, fingerprint)}
        return near & suiting or suiting or others or near

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: RequestMetadata | None = None
    ) -> None:
        """Give a replica to the request that it was chosen for; Serve's gives it to the oldest."""
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                self._record_queue_wait_time(pending)
                pending.future.set_result(replica)
                self._remove_pending_request_from_indices(pending)
                return


def _facts_of(replica: RunningReplica) -> ReplicaFacts:
    fingerprint = replica.replica_metadata.get("fingerprint")
    return ReplicaFacts(replica.replica_id.unique_id, replica.node_id, fingerprint)


def _request_of(
    pending_request: PendingRequest | None,
) -> GenerationRequest | PoolingRequest | None:
    """Return the request for a text or for rows that a call makes; None for other calls."""
    args = () if pending_request is None else pending_request.args
    requests = (each for each in args if isinstance(each, GenerationRequest | PoolingRequest))
    return next(requests, None)
