"""Who is next by its claim."""

from dataclasses import dataclass, field
from itertools import count, islice

from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.claims import Claim, ClaimQueue

NUMBERS = count()


@dataclass(eq=False)
class Waiting:
    """What waits."""

    name: str
    claim: Claim = field(default_factory=Claim)
    is_resumed: bool = False
    came_s: float = 0.0
    arrival: int = field(default_factory=NUMBERS.__next__)


def order(queue: ClaimQueue[Waiting]) -> str:
    """Return the names of all that wait, in order."""
    assert len([*queue]) == len(queue)
    return "".join(each.name for each in queue)


def queue_of(*waiting: Waiting) -> ClaimQueue[Waiting]:
    queue = ClaimQueue[Waiting](aging_s=60)
    for each in waiting:
        queue.add(each)
    return queue


def test_with_one_priority_and_tenant_resumed_ones_go_first_and_then_the_oldest() -> None:
    queue = queue_of(*map(Waiting, "abc"), Waiting("d", is_resumed=True), Waiting("e"))
    assert order(queue) == "dabce"


def test_a_better_priority_goes_first() -> None:
    queue = queue_of(
        Waiting("a"), Waiting("b", Claim(priority=-1)), Waiting("c", Claim(5)), Waiting("d")
    )
    assert order(queue) == "badc"


def test_who_has_waited_longer_than_the_aging_goes_before_a_priority_better_by_one() -> None:
    def of_two(came_s: float) -> str:
        return order(queue_of(Waiting("b", came_s=came_s), Waiting("w", Claim(priority=1))))

    assert (of_two(59), of_two(60), of_two(61)) == ("bw", "bw", "wb")


def test_a_priority_has_waited_as_long_as_the_one_of_it_that_waits_longest() -> None:
    low = Claim(priority=1)
    queue = queue_of(
        Waiting("b", came_s=100),
        Waiting("n", low, came_s=0),
        Waiting("r", low, is_resumed=True, came_s=90),
    )
    assert order(queue) == "rnb", "the resumed one goes first in the turn of its priority"


def test_of_tenants_the_one_that_was_served_least_goes_first() -> None:
    served = {"a": 5.0, "b": 3.0}
    queue = ClaimQueue[Waiting](60, lambda tenant: (served[tenant], 0))
    for name, tenant in (("1", "a"), ("2", "a"), ("3", "b"), ("4", "b")):
        queue.add(Waiting(name, Claim(tenant=tenant)))
    assert order(queue) == "3412"
    served["b"] = 6.0
    assert order(queue) == "1234"


class Counted(Waiting):
    """Counts how often any is looked at."""

    num_looks = 0

    def __getattribute__(self, name: str) -> object:
        if name in {"came_s", "arrival"}:
            Counted.num_looks += 1
        return super().__getattribute__(name)


def test_the_next_few_are_found_without_a_look_at_all_that_wait() -> None:
    claims = [Claim(number % 2, "ab"[number % 3 % 2]) for number in range(1000)]
    queue = queue_of(*(Counted(str(number), claim) for number, claim in enumerate(claims)))
    Counted.num_looks = 0
    assert next(iter(queue)) is queue.first
    assert len([*islice(queue, 3)]) == 3
    assert queue.oldest_s == 0
    assert Counted.num_looks < 100


@given(
    st.lists(
        st.tuples(
            st.integers(-1, 1), st.booleans(), st.sampled_from("ab"), st.sampled_from([0, 50, 100])
        ),
        max_size=12,
    )
)
def test_each_in_turn_is_the_first(kinds: list[tuple[int, bool, str, int]]) -> None:
    made = [
        Waiting(str(i), Claim(priority, tenant), is_resumed, came_s)
        for i, (priority, is_resumed, tenant, came_s) in enumerate(kinds)
    ]
    queue = queue_of(*reversed(made))
    for expected in [*queue]:
        assert queue.oldest_s == min(each.came_s for each in queue.unordered)
        first = queue.first
        assert first == expected
        queue.remove(expected)
    assert queue.first is None
    assert len(queue) == 0
