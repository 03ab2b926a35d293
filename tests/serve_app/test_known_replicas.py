from serve_app.known_replicas import MEMORY_S, KnownReplicas


def test_those_count_who_have_answered_lately() -> None:
    replicas = KnownReplicas()
    assert replicas.count(0) == 0
    replicas.note("a", 0)
    replicas.note("b", 1)
    replicas.note("a", 2)
    assert replicas.count(2) == 2
    assert replicas.count(1 + MEMORY_S) == 2
    assert replicas.count(1.5 + MEMORY_S) == 1
    assert replicas.count(3 + MEMORY_S) == 0
