from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.claims import Backlogs, Claim, FairShares, StreamCost, TenantService, cost
from deployments.contract.claims import shares as fair_shares
from deployments.contract.output import FinishReason, PromptLogprobs, TextDelta

A, B = Claim(tenant="a"), Claim(tenant="b")
HEAVY = Claim(tenant="heavy", weight=3)


def from_ingress(ingress: str, num_served: float = 0, backlog: int = 0) -> Claim:
    return Claim(tenant="a", num_served=num_served, ingress=ingress, backlog=backlog)


def test_an_answers_token_costs_as_much_as_two_of_a_prompt() -> None:
    assert cost(100, 10) == 120


def test_a_prompt_is_charged_once_where_the_answer_begins() -> None:
    scored = TextDelta((), "", prompt_logprobs=(PromptLogprobs(None, 0, b"", b"", b"", ()),))
    parked, aborted = (
        TextDelta((), "", reason) for reason in (FinishReason.PARKED, FinishReason.ABORT)
    )
    for left in ([parked], [aborted], [scored, parked]):
        assert StreamCost(100).of(left) == 0, "another replica begins with it"
    costs = StreamCost(100)
    assert costs.of([scored]) == 0
    assert costs.of([scored, TextDelta((1,), "a", num_cached_tokens=30)]) == 70 + 2
    assert costs.of([TextDelta((2,), "b")]) == 2
    assert costs.of([parked]) == 0
    assert StreamCost(100).of([TextDelta((1,), "a"), parked]) == 102
    assert StreamCost(100).of([TextDelta((), "", FinishReason.LENGTH)]) == 100, "only scored"


def test_what_a_tenant_gets_is_divided_by_its_weight() -> None:
    shares = FairShares()
    for claim in (A, HEAVY):
        shares.enter(claim)
        shares.charge(claim, 30)
    assert (shares.counter("a"), shares.counter("heavy")) == (30, 10 + 30)
    # The second began at the counter of the first.


def test_a_tenant_that_begins_to_wait_starts_at_the_least_counter_of_those_that_wait() -> None:
    shares = FairShares()
    for claim, served in ((A, 100), (B, 300)):
        shares.enter(claim)
        shares.charge(claim, served)
    shares.enter(Claim(tenant="new"))
    assert shares.counter("new") == 100
    assert (shares.counter("a"), shares.counter("b")) == (100, 400)


def test_idling_saves_nothing_up_even_while_no_tenant_waits() -> None:
    shares = FairShares()
    shares.enter(A)
    shares.leave(A)
    shares.charge(A, 500)
    shares.enter(B)
    assert shares.counter("b") == 500


def test_a_tenant_that_was_ahead_stays_ahead_when_it_waits_again() -> None:
    shares = FairShares()
    shares.enter(B)
    shares.enter(A)
    shares.charge(A, 100)
    shares.leave(A)
    shares.enter(A)
    assert shares.counter("a") == 100, "leaving the queue for a moment pays no debt"


def test_the_gap_is_between_the_most_and_the_least_served_of_those_that_wait() -> None:
    shares = FairShares()
    assert shares.gap == 0
    shares.enter(A)
    shares.charge(A, 100)
    assert shares.gap == 0, "one tenant alone is never behind"
    shares.enter(B)
    shares.charge(A, 60)
    assert shares.gap == 60
    shares.enter(HEAVY)
    shares.charge(HEAVY, 30)
    assert (shares.counter("heavy"), shares.gap) == (110, 60)
    shares.leave(A)
    assert shares.gap == 10


def test_tenants_are_told_that_waited_last() -> None:
    shares = FairShares()
    for claim, served in ((A, 100), (HEAVY, 30), (B, 5)):
        shares.enter(claim)
        shares.charge(claim, served)
    shares.leave(B)
    assert shares.of_tenants(2) == (
        TenantService("b", 1.0, 0, 5.0),
        TenantService("heavy", 3.0, 1, 30.0),
    )
    assert [each.tenant for each in shares.of_tenants(9)] == ["b", "heavy", "a"]


def test_what_other_replicas_served_is_learned_while_the_tenant_waits() -> None:
    shares = FairShares()
    shares.enter(from_ingress("one", 1000))
    shares.enter(from_ingress("two", 70))
    assert shares.counter("a") == 0, "what came before says nothing about those that wait now"
    shares.enter(from_ingress("one", 1040))
    shares.enter(from_ingress("two", 80))
    assert shares.counter("a") == 50


def test_what_was_served_here_is_not_counted_again_when_its_ingress_tells_of_it() -> None:
    shares = FairShares()
    shares.enter(from_ingress("one", 0))
    shares.charge(from_ingress("one"), 40)
    shares.enter(from_ingress("one", 30))
    assert shares.counter("a") == 40, "ten of them are under way"
    shares.enter(from_ingress("one", 45))
    assert shares.counter("a") == 45, "five came from another replica"


def test_what_a_tenant_got_elsewhere_while_it_did_not_wait_here_costs_nothing_here() -> None:
    shares = FairShares()
    shares.enter(from_ingress("one", 0))
    shares.leave(A)
    shares.enter(B)
    shares.enter(from_ingress("one", 10**6))
    assert shares.counter("a") == shares.counter("b")


def test_a_tenant_that_has_waited_at_another_replica_keeps_its_counter() -> None:
    for backlog, expected in ((7, 10 + 25), (8, 10 + 100)):
        shares = FairShares()
        shares.enter(from_ingress("one", 50, backlog=7))
        shares.charge(from_ingress("one"), 10)
        shares.leave(A)
        shares.enter(B)
        shares.charge(B, 100)
        shares.enter(from_ingress("one", 50 + 10 + 25, backlog))
        assert shares.counter("a") == expected, backlog


def test_a_backlog_is_another_one_once_none_waited() -> None:
    backlogs = Backlogs()
    first, second, other = (backlogs.enter(tenant) for tenant in ("a", "a", "b"))
    assert backlogs.numbers == {"a": 1, "b": 2}
    first()
    first()
    assert backlogs.numbers == {"a": 1, "b": 2}, "the second waits"
    second()
    other()
    assert backlogs.numbers == {}
    backlogs.enter("a")
    assert backlogs.numbers == {"a": 3}


def test_an_ingress_that_tells_late_takes_nothing_back() -> None:
    shares = FairShares()
    for total in (10, 50, 20, 50):
        shares.enter(from_ingress("one", total))
    assert shares.counter("a") == 40


def test_cached_tokens_of_a_prompt_are_taken_back() -> None:
    shares = FairShares()
    shares.enter(A)
    shares.charge(A, 100)
    shares.charge(A, -80)
    assert shares.counter("a") == 20


def test_tenants_are_forgotten_but_never_those_that_wait() -> None:
    shares = FairShares()
    shares.enter(A)
    shares.charge(A, 7)
    for number in range(2 * fair_shares.MAX_TENANTS):
        each = Claim(tenant=str(number))
        shares.enter(each)
        shares.leave(each)
    assert len(shares._tenants) == fair_shares.MAX_TENANTS
    assert shares.counter("a") == 7


def test_ingresses_that_have_ended_are_forgotten() -> None:
    shares = FairShares()
    for number in range(2 * fair_shares.MAX_INGRESSES):
        shares.enter(from_ingress(str(number)))
    assert len(shares._tenants["a"].told) == fair_shares.MAX_INGRESSES


def waiting(*claims: Claim, size: float = 1) -> list[tuple[int, Claim, float]]:
    """Return what waits, by its number, oldest first."""
    return [(number, claim, size) for number, claim in enumerate(claims)]


def test_the_newest_of_the_tenant_furthest_beyond_its_part_makes_room() -> None:
    shares = FairShares()
    for claim in (A, B, HEAVY):
        shares.enter(claim)
    queue = waiting(*[A] * 30, *[HEAVY] * 34)
    # Of 64 places, 13 are a's and b's each, and 38 heavy's.
    assert shares.to_go(B, 1, 64, queue) == [29]
    assert shares.to_go(B, 3, 64, queue) == [29, 28, 27]
    assert shares.to_go(HEAVY, 1, 64, queue) == [29]
    assert shares.to_go(A, 1, 64, queue) == [], "it has more than its part itself"
    assert shares.to_go(B, 18, 64, queue) == [], "the other would keep less than its part"


def test_a_tenant_of_which_none_may_go_protects_no_other_beyond_its_part() -> None:
    shares = FairShares()
    better, new = Claim(-1, "a"), Claim(tenant="new")
    assert shares.to_go(new, 1, 10, waiting(*[better] * 6, *[B] * 4)) == []
    assert shares.to_go(new, 1, 10, waiting(*[better] * 5, *[B] * 5)) == [9]
    queue = waiting(*[A] * 5, *[B] * 5)
    assert shares.to_go(new, 1, 10, queue, lambda number: number >= 5) == [9]
    sizes = [(0, A, 60.0), (1, B, 10.0), (2, B, 10.0), (3, B, 20.0)]
    assert shares.to_go(new, 5, 90, sizes) == [], "each would keep less than its 30"
    assert shares.to_go(new, 5, 90, [*sizes, (4, B, 5.0)]) == [4]


def test_no_two_tenants_take_the_same_room_from_each_other_by_turns() -> None:
    shares = FairShares()
    assert shares.to_go(B, 1, 1, waiting(A)) == []
    assert shares.to_go(B, 1, 3, waiting(A, A, A)) == [2]
    assert shares.to_go(A, 1, 3, waiting(A, A, B)) == []
    assert shares.to_go(B, 2, 3, waiting(A, A, A)) == [], "two more would leave it one"


def test_room_in_tokens_is_divided_as_room_for_requests() -> None:
    shares = FairShares()
    queue = waiting(*[A] * 10, size=10)
    assert shares.to_go(B, 25, 100, queue) == [9, 8, 7]
    assert shares.to_go(B, 51, 100, queue) == []


def test_a_worse_priority_makes_room_before_shares_are_looked_at() -> None:
    shares = FairShares()
    low, lower = Claim(1, "a"), Claim(2, "b")
    queue = waiting(low, lower, low, lower, A)
    assert shares.to_go(A, 3, 5, queue) == [3, 1, 2]
    assert shares.to_go(low, 2, 5, queue) == [3, 1]
    assert shares.to_go(lower, 1, 5, queue) == [], "it takes no room from a better one"


def test_with_one_tenant_and_one_priority_nothing_makes_room() -> None:
    shares = FairShares()
    shares.enter(A)
    assert shares.to_go(A, 1, 4, waiting(*[A] * 4)) == []


@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=4),
    st.lists(st.integers(1, 50), min_size=400, max_size=400),
)
def test_backlogged_tenants_get_service_by_their_weights(
    weights: Sequence[int], costs: Sequence[int]
) -> None:
    """The difference is bounded by the largest service that is given at once (theorem 4.4)."""
    shares = FairShares()
    waiting = [Claim(tenant=str(at), weight=weight) for at, weight in enumerate(weights)]
    for claim in waiting:
        shares.enter(claim)
    served: Counter[str] = Counter()
    for served_now in costs:
        least = min(waiting, key=lambda claim: shares.counter(claim.tenant))
        shares.charge(least, served_now)
        served[least.tenant] += served_now
    by_weight = [served[claim.tenant] / claim.weight for claim in waiting]
    assert max(by_weight) - min(by_weight) <= 2 * max(costs)


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(1, 20), st.booleans()),
        max_size=60,
    )
)
def test_nothing_is_counted_twice_whatever_the_way_of_the_news(
    steps: Sequence[tuple[int, int, int, bool]],
) -> None:
    """Two replicas, two ingresses; what is served reaches its ingress at once or much later."""
    replicas = [FairShares(), FairShares()]
    totals = [0, 0]
    late: list[tuple[int, int]] = []
    truth = 0
    for replica in replicas:
        for ingress in range(2):
            replica.enter(from_ingress(str(ingress)))
    for at, ingress, served, arrives in steps:
        claim = from_ingress(str(ingress), totals[ingress])
        replicas[at].enter(claim)
        replicas[at].charge(claim, served)
        truth += served
        late.append((ingress, served))
        if arrives:
            for through, gained in late:
                totals[through] += gained
            late.clear()
        assert all(replica.counter("a") <= truth for replica in replicas)
    for ingress, gained in late:
        totals[ingress] += gained
    for replica in replicas:
        for ingress in range(2):
            replica.enter(from_ingress(str(ingress), totals[ingress]))
        assert replica.counter("a") == truth
