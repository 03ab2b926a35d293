from benchmarks.engine import PARTS, timed_parts


def test_the_parts_of_a_step_are_where_the_benchmark_looks_for_them() -> None:
    with timed_parts() as parts:
        for owner, attribute in PARTS.values():
            assert callable(getattr(owner, attribute))
        assert not any(parts.values())
