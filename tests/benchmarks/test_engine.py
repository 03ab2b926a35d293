from benchmarks.engine import PARTS, timed_parts
from tests.engine.collector import GREEDY, run_one


def test_every_part_of_a_step_is_timed_where_the_engine_runs_it() -> None:
    with timed_parts() as parts:
        num_tokens = len(run_one(GREEDY).token_ids("s"))
    assert {name: len(seconds) for name, seconds in parts.items()} == dict.fromkeys(
        PARTS, num_tokens
    )
    assert all(min(seconds) > 0 for seconds in parts.values())
