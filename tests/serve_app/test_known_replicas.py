import pytest

from deployments.contract import Accepted, Classified, Refused
from deployments.errors import OverloadedError
from serve_app.known_replicas import MEMORY_S, KnownReplicas


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
