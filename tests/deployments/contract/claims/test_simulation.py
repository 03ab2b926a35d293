"""Two tenants at two replicas behind two ingresses, simulated: each gets what its weight says."""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from deployments.contract.claims import Backlogs, Claim, FairShares, cost

TENANTS = (Claim(tenant="one"), Claim(tenant="three", weight=3))
NUM_CLIENTS, NUM_PLACES = 64, 8
"""Clients of each tenant, and sequences that a replica runs at once."""

STEP_S, NUM_STEPS, NUM_FIRST_STEPS = 0.004, 8000, 1000
"""Of a replica; the first ones are not counted."""


@dataclass
class Ingress:
    shares: FairShares = field(default_factory=FairShares)
    backlogs: Backlogs = field(default_factory=Backlogs)


@dataclass
class Sequence:
    claim: Claim
    ingress: Ingress
    leave: Callable[[], None]
    num_left: int  # tokens


@dataclass
class Replica:
    shares: FairShares = field(default_factory=FairShares)
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)

    def step(self) -> list[Sequence]:
        """Give each sequence that runs a token; return those that have ended."""
        while self.waiting and len(self.running) < NUM_PLACES:
            first = min(self.waiting, key=lambda each: self.shares.counter(each.claim.tenant))
            self.waiting.remove(first)
            self.shares.leave(first.claim)
            self.running.append(first)
        for each in self.running:
            each.leave()
            each.num_left -= 1
            self.shares.charge(each.claim, cost(0, 1))
            each.ingress.shares.charge(each.claim, cost(0, 1))
        ended = [each for each in self.running if not each.num_left]
        self.running = [each for each in self.running if each.num_left]
        return ended


def ratio(pause_s: float, *, tells_backlogs: bool) -> float:
    """Return the tokens of the tenant with three times the weight beside the other's.

    Args:
        pause_s: From the end of an answer until its client asks again.
        tells_backlogs: Whether ingresses tell since when a tenant has waited.
    """
    random = Random(0)
    replicas, ingresses = (Replica(), Replica()), (Ingress(), Ingress())
    clients = [(0.05 * random.random(), at, each) for at in range(NUM_CLIENTS) for each in (0, 1)]
    heapq.heapify(clients)
    found: Counter[str] = Counter()
    for step in range(NUM_STEPS):
        while clients and clients[0][0] <= step * STEP_S:
            _, at, number = heapq.heappop(clients)
            ingress, tenant = ingresses[at % 2], TENANTS[number]
            leave = ingress.backlogs.enter(tenant.tenant)
            claim = replace(
                tenant,
                num_served=ingress.shares.served(tenant),
                ingress=str(at % 2),
                backlog=ingress.backlogs.numbers[tenant.tenant] if tells_backlogs else 0,
            )
            # Which of the two has less to do is known a moment late, so it is as good as any.
            chosen = random.choice(replicas)
            chosen.shares.enter(claim)
            chosen.waiting.append(Sequence(claim, ingress, leave, random.randint(16, 48)))
        for replica in replicas:
            if step >= NUM_FIRST_STEPS:
                found.update(each.claim.tenant for each in replica.running)
            for each in replica.step():
                again_s = step * STEP_S + pause_s * random.uniform(0.9, 1.1)
                number = TENANTS.index(replace(each.claim, num_served=0, ingress="", backlog=0))
                heapq.heappush(clients, (again_s, random.randrange(2**20), number))
    return found["three"] / found["one"]


@pytest.mark.parametrize("pause_s", [0.02, 0.2, 0.4])
def test_tenants_get_what_their_weights_say_while_both_wait(pause_s: float) -> None:
    assert ratio(pause_s, tells_backlogs=True) == pytest.approx(3, rel=0.1)


def test_a_tenant_that_waits_at_the_other_replica_would_lose_its_claim() -> None:
    assert ratio(0.4, tells_backlogs=False) < 2.75
