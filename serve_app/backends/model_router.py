"""Serve's router for a model: it prefers replicas that have run the beginning of a prompt.

It also writes down which replicas run, and respects versions and drains.

Serve names it in a deployment's `request_router_config`, copies this module by value into each
process that calls the deployment, and runs it in a thread of its own. So the module holds no state.
"""

from typing import Any

from ray.serve._private.replica_result import ReplicaResult
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from deployments.contract import GenerationRequest
from serve_app.backends.prefix_memory import PrefixMemory, prefix_keys
from serve_app.backends.running_replicas import (
    ReplicaFacts,
    RunningReplicas,
    running_replicas_of,
)

PATH = "serve_app.backends.model_router:ModelRouter"
"""How a deployment names it."""


class ModelRouter(PowerOfTwoChoicesRequestRouter):
    """Takes the replica that has run the most of a prompt's beginning, unless it is too busy.

    Else it takes the less busy of two that suit a request.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Start without memories; Serve calls this after it has made the router."""
        self._memory = PrefixMemory()

    @property
    def _running(self) -> RunningReplicas:
        return running_replicas_of(self._deployment_id.app_name, self._deployment_id.name)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note which replicas run; called at each change, and when one is found dead."""
        self._running.replace(_facts_of(each) for each in replicas)
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas to try: first the one that has run the prompt's beginning, if any."""
        ranks: list[list[RunningReplica]] = await super().choose_replicas(
            candidate_replicas, pending_request
        )
        request = _request_of(pending_request)
        if request is None or not ranks:
            return ranks
        suiting = self.apply_locality_routing(pending_request)
        loads = {each.unique_id: self._replica_queue_len_cache.get(each) or 0 for each in suiting}
        chosen = self._memory.choose(prefix_keys(request), loads)
        return [[self._replicas[e]] for e in suiting if e.unique_id == chosen] + ranks

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Remember which replica runs a prompt."""
        request = _request_of(pending_request)
        if request is not None:
            self._memory.note(prefix_keys(request), replica_id.unique_id)

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
