from collections.abc import Sequence

import pytest

from deployments.contract.errors import InvalidRequestError, ModelChangedError, OverloadedError
from deployments.contract.generation import Accepted, Refused
from serve_app.backends.replicas.admission_queue import FullError
from serve_app.backends.replicas.refusals import MAX_ATTEMPTS, raise_refusal, until_taken
from serve_app.backends.replicas.running_replicas import ReplicaFacts, RunningReplicas
from tests.offenders import for_each


def running(*replica_ids: str) -> RunningReplicas:
    """Return replicas, each on a node of its own, which has the same name."""
    replicas = RunningReplicas()
    replicas.replace(ReplicaFacts(replica_id, replica_id) for replica_id in replica_ids)
    return replicas


def full(replica_id: str, retry_after_s: int = 7) -> Refused:
    """Return the refusal of a replica that has no room for any request."""
    return Refused(OverloadedError("full", None, retry_after_s), replica_id, is_full=True)


def too_many_tokens(replica_id: str, retry_after_s: int = 7) -> Refused:
    """Return the refusal of a replica that has room for smaller requests."""
    return Refused(OverloadedError("many tokens wait", None, retry_after_s), replica_id)


class Asked:
    """Replicas that answer in turn, like those that the router picks.

    Attributes:
        num_calls: How many have answered.
        refused_by: Which had refused before each call.
    """

    def __init__(self, *answers: Accepted | Refused) -> None:
        self.num_calls = 0
        self.refused_by: list[set[str]] = []
        self._answers = answers

    async def __call__(self, refused_by: set[str]) -> str:
        self.refused_by.append(set(refused_by))
        answer = self._answers[self.num_calls]
        self.num_calls += 1
        raise_refusal(answer, refused_by)
        return answer.replica_id


async def test_a_replica_that_has_never_answered_is_asked_too() -> None:
    ask = Asked(full("a"), Accepted(3, "b"))
    assert await until_taken(ask, running("a", "b")) == "b"


async def test_each_call_says_which_replicas_have_refused() -> None:
    other = Refused(ModelChangedError("another version", None, 1), "b")
    ask = Asked(full("a"), other, Accepted(3, "c"))
    assert await until_taken(ask, running("a", "b", "c")) == "c"
    assert ask.refused_by == [set(), {"a"}, {"a", "b"}]


async def test_a_replica_that_refuses_and_leaves_takes_no_other_s_turn() -> None:
    replicas = running("a", "b")

    async def ask(refused_by: set[str]) -> str:
        if refused_by:
            return "b"
        replicas.replace([ReplicaFacts("b", "b")])
        raise_refusal(full("a"), refused_by)
        raise AssertionError("it is refused")

    assert await until_taken(ask, replicas) == "b"


async def test_a_replica_that_comes_while_the_others_refuse_is_asked_too() -> None:
    replicas = running("a")

    async def ask(refused_by: set[str]) -> str:
        if refused_by:
            return "b"
        replicas.replace([ReplicaFacts("a", "a"), ReplicaFacts("b", "b")])
        raise_refusal(full("a"), refused_by)
        raise AssertionError("it is refused")

    assert await until_taken(ask, replicas) == "b"


@pytest.mark.parametrize(("num_replicas", "num_calls"), [(0, 1), (1, 1), (2, 2), (8, MAX_ATTEMPTS)])
async def test_each_replica_is_asked_once_but_only_a_few(num_replicas: int, num_calls: int) -> None:
    names = "abcdefgh"[:num_replicas]
    ask = Asked(*(full(name) for name in names or "a"))
    with pytest.raises(OverloadedError, match="full"):
        await until_taken(ask, running(*names))
    assert ask.num_calls == num_calls


async def test_a_replica_on_a_node_that_stops_is_not_waited_for() -> None:
    replicas = running("a", "b")
    replicas.set_draining_nodes(frozenset("b"))
    ask = Asked(full("a"))
    with pytest.raises(FullError):
        await until_taken(ask, replicas)


@for_each(
    ([full("a")], True),
    ([too_many_tokens("a")], False),
    ([full("a"), full("b", 9)], True),
    ([full("a"), full("a", 9)], False),
    ([full("a"), too_many_tokens("b", 9)], False),
)
async def test_full_error_is_raised_only_if_every_replica_is_full(
    answers: Sequence[Refused], are_all_full: bool
) -> None:
    with pytest.raises(OverloadedError) as caught:
        await until_taken(Asked(*answers), running(*"ab"[: len(answers)]))
    assert isinstance(caught.value, FullError) is are_all_full
    assert caught.value.retry_after_s == 7


async def test_a_refusal_says_more_than_another_version() -> None:
    other = Refused(ModelChangedError("another version", None, 1), "a")
    with pytest.raises(OverloadedError, match="full"):
        await until_taken(Asked(other, full("b")), running("a", "b"))
    with pytest.raises(ModelChangedError):
        await until_taken(Asked(other, other), running("a", "b"))


async def test_a_client_s_fault_is_offered_to_no_other_replica() -> None:
    ask = Asked(Refused(InvalidRequestError("too long", "messages"), "a"), Accepted(3, "b"))
    with pytest.raises(InvalidRequestError, match="too long"):
        await until_taken(ask, running("a", "b"))
    assert ask.num_calls == 1
