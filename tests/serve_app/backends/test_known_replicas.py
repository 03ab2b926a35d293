import pytest

from deployments.contract import Accepted, Classified, Refused
from deployments.errors import OverloadedError
from serve_app.known_replicas import MEMORY_S, KnownReplicas
from serve_app.opening_line import FullError


def test_those_count_who_have_answered_lately() -> None:
    now_s = 0.0
    replicas = KnownReplicas(lambda: now_s)
    assert replicas.count() == 0
    replicas.hear(Accepted(3, "a"))
    now_s = 1
    replicas.hear(Classified((), "b"))
    now_s = 2
    replicas.hear(Accepted(3, "a"))
    assert replicas.count() == 2
    now_s = 1 + MEMORY_S
    assert replicas.count() == 2
    now_s = 1.5 + MEMORY_S
    assert replicas.count() == 1
    now_s = 3 + MEMORY_S
    assert replicas.count() == 0


def test_a_refusal_is_an_answer_too() -> None:
    replicas = KnownReplicas()
    with pytest.raises(OverloadedError, match="full") as caught:
        replicas.hear(Refused("full", 7, "a"))
    assert caught.value.retry_after_s == 7
    assert replicas.count() == 1


@pytest.mark.parametrize(
    ("answers", "are_all_full"),
    [
        ([Refused("full", 7, "a", True)], True),
        ([Refused("many tokens wait", 7, "a", False)], False),
        ([Refused("full", 7, "a", True), Refused("full", 9, "b", True)], True),
        ([Refused("full", 7, "a", True), Refused("many tokens wait", 9, "b", False)], False),
    ],
)
async def test_that_all_are_full_is_said_only_if_each_has_said_so(
    answers: list[Refused], are_all_full: bool
) -> None:
    replicas = KnownReplicas()
    for answer in answers:
        replicas.hear(Accepted(3, answer.replica_id))
    told = iter(answers)

    async def call() -> None:
        replicas.hear(next(told))

    with pytest.raises(OverloadedError) as caught:
        await replicas.until_taken(call)
    assert isinstance(caught.value, FullError) is are_all_full
    assert caught.value.retry_after_s == 7


async def test_a_replica_that_was_not_asked_may_have_room() -> None:
    replicas = KnownReplicas()
    for replica_id in ("a", "b"):
        replicas.hear(Accepted(3, replica_id))

    async def call() -> None:
        replicas.hear(Refused("full", 7, "a", True))

    with pytest.raises(OverloadedError) as caught:
        await replicas.until_taken(call)
    assert type(caught.value) is OverloadedError
