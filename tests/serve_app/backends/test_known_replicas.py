import pytest

from deployments.contract import Accepted, Pooled, Refused
from deployments.errors import OverloadedError
from serve_app.backends.admission_queue import FullError
from serve_app.backends.known_replicas import MEMORY_S, KnownReplicas


def test_replicas_that_answered_lately_count() -> None:
    now_s = 0.0
    replicas = KnownReplicas(lambda: now_s)
    assert replicas.count() == 0
    replicas.hear(Accepted(3, "a"))
    now_s = 1
    replicas.hear(Pooled((), "b"))
    now_s = 2
    replicas.hear(Accepted(3, "a"))
    assert replicas.count() == 2
    now_s = 1 + MEMORY_S
    assert replicas.count() == 2
    now_s = 1.5 + MEMORY_S
    assert replicas.count() == 1
    now_s = 3 + MEMORY_S
    assert replicas.count() == 0


def test_a_refusal_counts_as_an_answer() -> None:
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
async def test_full_error_is_raised_only_if_every_replica_is_full(
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


async def test_a_known_replica_that_was_not_asked_prevents_a_full_error() -> None:
    replicas = KnownReplicas()
    for replica_id in ("a", "b"):
        replicas.hear(Accepted(3, replica_id))

    async def call() -> None:
        replicas.hear(Refused("full", 7, "a", True))

    with pytest.raises(OverloadedError) as caught:
        await replicas.until_taken(call)
    assert type(caught.value) is OverloadedError
