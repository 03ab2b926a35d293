"""Fair shares: which tenant is next, and which one makes room in a full queue.

A tenant's counter is the service that it got, divided by its weight: of the tenants that wait, the
one with the least counter is next. A tenant that begins to wait starts at the least counter of
those that wait already, so that idling saves nothing up. One that has waited at another replica
since it last did here has not been idle, and keeps its counter: its ingress numbers the times for
which a tenant has waited without a break.

A replica learns what other replicas served from the ingresses: each sends with a request what it
has passed on to the request's tenant, from all replicas. Of a tenant that waits, the replica counts
what that has grown by since the last request, and what it serves itself is never counted twice.

Source: Sheng et al., Fairness in serving large language models, 2024 (arXiv 2401.00588),
algorithm 2, the virtual token counter.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

from deployments.contract.claims.claim import Claim
from deployments.contract.output import FinishReason, TextDelta

Item = TypeVar("Item")

ANSWER_COST: Final = 2.0
"""Tokens of a prompt that one of an answer costs, because it takes a step of its own. Source: the
paper's evaluation."""

MAX_TENANTS: Final = 1024
"""Tenants that are remembered; those that have not waited for the longest time are forgotten."""

MAX_INGRESSES: Final = 64
"""Ingresses whose words are remembered for a tenant; those of ended ones leave in time."""


def cost(num_prompt_tokens: int, num_answer_tokens: int = 0) -> float:
    """Return the weighted tokens of a service.

    Args:
        num_prompt_tokens: Tokens of prompts that were computed, not found in a cache.
        num_answer_tokens: Tokens of answers.
    """
    return num_prompt_tokens + ANSWER_COST * num_answer_tokens


@dataclass(frozen=True, slots=True)
class TenantService:
    """What a tenant got of one replica.

    Attributes:
        tenant: Its name; empty without keys.
        weight: The weight of its latest request.
        num_waiting: Its requests that wait; of a pooler, also those that run.
        served_tokens: The weighted tokens that it got here; each of an answer counts `ANSWER_COST`.
    """

    tenant: str
    weight: float
    num_waiting: int
    served_tokens: float


class StreamCost:
    """What a text costs its tenant, as its deltas go out."""

    def __init__(self, num_prompt_tokens: int) -> None:
        """Start before the first delta.

        Args:
            num_prompt_tokens: Tokens of the prompt; 0 if the answer has begun elsewhere.
        """
        self._num_prompt_tokens = num_prompt_tokens

    def of(self, deltas: Sequence[TextDelta]) -> float:
        """Return the weighted tokens of the next deltas, at least one.

        The prompt's come with the answer's first delta, which tells how much was cached. If the
        text leaves before that, it goes on elsewhere, and the prompt is charged there.
        """
        last, num_answer_tokens = deltas[-1], sum(len(delta.token_ids) for delta in deltas)
        has_left = last.finish_reason in (FinishReason.PARKED, FinishReason.ABORT)
        has_begun = num_answer_tokens or not (last.prompt_logprobs or has_left)
        num_prompt_tokens = 0
        if self._num_prompt_tokens and has_begun:
            num_cached_tokens = max(delta.num_cached_tokens for delta in deltas)
            num_prompt_tokens = self._num_prompt_tokens - num_cached_tokens
            self._num_prompt_tokens = 0
        return cost(num_prompt_tokens, num_answer_tokens)


@dataclass(slots=True)
class _Told:
    """What an ingress told of a tenant last.

    Attributes:
        num_served: What it has passed on to the tenant, as far as this side knows.
        backlog: See `Claim`.
    """

    num_served: float
    backlog: int


@dataclass(eq=False, slots=True)
class _Tenant:
    """What is known of one tenant.

    Attributes:
        counter: Its weighted tokens, divided by its weight.
        weight: The weight of its latest request.
        served: Its weighted tokens from here on.
        num_waiting: Its requests that wait.
        told: What each ingress told of it last; by ingress.
    """

    counter: float = 0.0
    weight: float = 1.0
    served: float = 0.0
    num_waiting: int = 0
    told: dict[str, _Told] = field(default_factory=dict)


class FairShares:
    """The counters of the tenants of one queue. Not thread-safe."""

    def __init__(self) -> None:
        """Start without tenants."""
        self._tenants: dict[str, _Tenant] = {}  # those that waited last are at the end
        self._waiting: dict[str, _Tenant] = {}
        self._left_last: _Tenant | None = None

    def counter(self, tenant: str) -> float:
        """Return a tenant's counter: its weighted tokens, divided by its weight."""
        known = self._tenants.get(tenant)
        return 0.0 if known is None else known.counter

    def served(self, claim: Claim) -> float:
        """Return the weighted tokens that were charged to a claim's tenant until now."""
        return self._tenant(claim).served

    @property
    def gap(self) -> float:
        """How far apart the counters of the tenants that wait are; 0 unless several wait.

        Fair service keeps it below what a few requests cost, however long the tenants wait.
        """
        counters = [tenant.counter for tenant in self._waiting.values()]
        return max(counters) - min(counters) if counters else 0.0

    def of_tenants(self, max_tenants: int) -> tuple[TenantService, ...]:
        """Return what the tenants got that waited last, the latest first.

        Args:
            max_tenants: The most to return.
        """
        latest = islice(reversed(self._tenants.items()), max_tenants)
        return tuple(
            TenantService(name, tenant.weight, tenant.num_waiting, tenant.served)
            for name, tenant in latest
        )

    def enter(self, claim: Claim) -> None:
        """Note that a request begins to wait; call `leave` once it no longer does."""
        tenant = self._tenant(claim)
        told = tenant.told.get(claim.ingress)
        has_waited = told is not None and 0 < told.backlog == claim.backlog
        self._learn(tenant, claim, is_waiting=has_waited or tenant.num_waiting > 0)
        if not tenant.num_waiting:
            if not has_waited:
                tenant.counter = max(tenant.counter, self._least())
            self._waiting[claim.tenant] = tenant
        tenant.num_waiting += 1

    def leave(self, claim: Claim) -> None:
        """Note that a request of `enter` no longer waits."""
        tenant = self._waiting[claim.tenant]
        tenant.num_waiting -= 1
        if not tenant.num_waiting:
            del self._waiting[claim.tenant]
            self._left_last = tenant

    def charge(self, claim: Claim, served: float) -> None:
        """Add weighted tokens that are served here to a request's tenant.

        Args:
            claim: The request's; a tenant that is not known is not charged.
            served: Weighted tokens; less than 0 takes some back.
        """
        tenant = self._tenants.get(claim.tenant)
        if tenant is None:
            return
        tenant.served += served
        tenant.counter += served / tenant.weight
        told = tenant.told.get(claim.ingress)
        if told is not None:  # it will pass them on, and count them
            told.num_served += served

    def to_go(
        self,
        claim: Claim,
        num_missing: float,
        limit: float,
        waiting: Sequence[tuple[Item, Claim, float]],
        may_go: Callable[[Item], bool] = lambda item: True,
    ) -> list[Item]:
        """Return what has to leave a full queue for a request; empty if that finds no room.

        Requests of a worse priority go first. Of the same priority, the queue is divided by weight
        among the tenants that use it and the one that asks: if that one uses less than its part,
        the newest go of the tenant that is furthest beyond its own, of those that have one that may
        go. A tenant keeps its part, so no two take the same room from each other by turns.

        Args:
            claim: Of the request that asks for room.
            num_missing: How much room is missing.
            limit: How much the queue holds.
            waiting: What waits, oldest first, each with its claim and the room that it takes: of
                those that may go, the last goes first.
            may_go: Returns whether one may leave; the others count, too.
        """
        used = defaultdict[str, float](float)
        for _, other, size in waiting:
            used[other.tenant] += size
        newest = [each for each in reversed(waiting) if may_go(each[0])]
        worse = [each for each in newest if each[1].priority > claim.priority]
        found: list[Item] = []
        for item, other, size in sorted(worse, key=lambda each: -each[1].priority):
            if num_missing > 0:
                found.append(item)
                used[other.tenant] -= size
                num_missing -= size
        if num_missing <= 0:
            return found
        equal = [each for each in newest if each[1].priority == claim.priority]
        beyond = self._beyond_part(claim, num_missing, limit, equal, used)
        return found + beyond if beyond else []

    def _beyond_part(
        self,
        claim: Claim,
        num_missing: float,
        limit: float,
        newest: Sequence[tuple[Item, Claim, float]],
        used: defaultdict[str, float],
    ) -> list[Item]:
        """Return the newest of the tenants that are furthest beyond their parts; see `to_go`."""
        weights = {name: self._weight(name) for name in used} | {claim.tenant: claim.weight}
        part = limit / sum(weights.values())
        if used[claim.tenant] >= part * claim.weight:
            return []
        left, found = list(newest), []
        while num_missing > 0:
            first_of: dict[str, tuple[Item, Claim, float]] = {}
            for each in left:
                first_of.setdefault(each[1].tenant, each)
            beyond = {
                name: used[name] - part * weights[name]
                for name, (_, _, size) in first_of.items()
                if used[name] - size >= part * weights[name]
            }
            if not beyond:
                return []
            victim = first_of[max(beyond, key=lambda name: beyond[name])]
            left.remove(victim)
            used[victim[1].tenant] -= victim[2]
            num_missing -= victim[2]
            found.append(victim[0])
        return found

    def _weight(self, tenant: str) -> float:
        known = self._tenants.get(tenant)
        return 1.0 if known is None else known.weight

    def _least(self) -> float:
        """Return the counter at which a tenant starts that begins to wait."""
        if self._waiting:
            return min(tenant.counter for tenant in self._waiting.values())
        return 0.0 if self._left_last is None else self._left_last.counter

    def _learn(self, tenant: _Tenant, claim: Claim, *, is_waiting: bool) -> None:
        """Count what an ingress has passed on from other replicas, if the tenant waits.

        While it did not wait, what it got elsewhere took nothing from those that wait here.
        """
        told = tenant.told.pop(claim.ingress, None)
        known = claim.num_served if told is None else told.num_served
        if is_waiting:
            tenant.counter += max(0.0, claim.num_served - known) / tenant.weight
        tenant.told[claim.ingress] = _Told(max(known, claim.num_served), claim.backlog)
        if len(tenant.told) > MAX_INGRESSES:
            del tenant.told[next(iter(tenant.told))]

    def _tenant(self, claim: Claim) -> _Tenant:
        tenant = self._tenants.pop(claim.tenant, None) or _Tenant()
        tenant.weight = claim.weight
        self._tenants[claim.tenant] = tenant
        if len(self._tenants) > MAX_TENANTS:
            idle = next((name for name in self._tenants if name not in self._waiting), None)
            if idle not in (None, claim.tenant):
                del self._tenants[idle]
        return tenant
