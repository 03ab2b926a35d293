from collections.abc import Callable

import pytest

from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.invariants import InvariantError
from deployments.engine.scheduling.sequence import Sequence, SequenceRequest
from tests.engine.tiny_models import load, make_engine, qwen2

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(name="engine")
def running_engine() -> Engine:
    """Return an engine: two sequences decode, the third is half prefilled, the fourth waits."""
    engine = make_engine(load(qwen2))
    for name, length in [("a", 3), ("b", 3), ("c", 40), ("d", 3)]:
        engine.add(SequenceRequest(name, tuple(range(60, 60 + length)), PARAMS))
    engine.step()
    engine.check()
    return engine


def sequence(engine: Engine, name: str) -> Sequence:
    return engine._sequences[name]


def lose_a_sequence(engine: Engine) -> None:
    del engine._sequences["a"]


def lose_a_detokenizer(engine: Engine) -> None:
    engine._detokenizers.close("b")


def leave_a_detokenizer(engine: Engine) -> None:
    engine._detokenizers.open(SequenceRequest("x", (1,), SamplingParams()))


def run_twice(engine: Engine) -> None:
    engine._scheduler.table.running[2] = sequence(engine, "a")


def lose_a_block(engine: Engine) -> None:
    engine._scheduler.table.extents.pools[0].num_free -= 1


def lose_an_extent(engine: Engine) -> None:
    engine._scheduler.table.extents.pools[0].give_back(sequence(engine, "a"))


def share_a_block(engine: Engine) -> None:
    pool = engine._scheduler.table.extents.pools[0]
    pool._extents[sequence(engine, "b")] = pool[sequence(engine, "a")]


def hold_too_little(engine: Engine) -> None:
    engine._scheduler.table.extents.pools[0].cut(sequence(engine, "c"), 1)


def run_and_wait(engine: Engine) -> None:
    engine._scheduler._waiting.append(sequence(engine, "a"))


def forget_a_token(engine: Engine) -> None:
    sequence(engine, "a").num_computed_tokens -= 1


def compute_while_waiting(engine: Engine) -> None:
    sequence(engine, "d").num_computed_tokens = 2


def overrun(engine: Engine) -> None:
    sequence(engine, "d").max_num_tokens = 3


def lose_the_budget(engine: Engine) -> None:
    engine._budget.tokens = 0


def plan_beyond_the_budget(engine: Engine) -> None:
    engine._scheduler.max_step_tokens = 2


def swap_the_queue(engine: Engine) -> None:
    engine.add(SequenceRequest("e", (60,), PARAMS))
    engine._scheduler._waiting.reverse()


@pytest.mark.parametrize(
    ("break_", "says"),
    [
        (lose_a_sequence, "a is scheduled but not known"),
        (lose_a_detokenizer, "b has no detokenizer"),
        (leave_a_detokenizer, "x has left a detokenizer"),
        (run_twice, "c is not scheduled"),
        (run_twice, "a is scheduled more than once"),
        (lose_a_block, "group 0 has 14 free blocks, not 13"),
        (lose_an_extent, "group 0 has 2 holders, not 3"),
        (share_a_block, "the extent at block 0 of group 0 overlaps"),
        (hold_too_little, "an extent of 8 tokens holds"),
        (run_and_wait, "a is scheduled more than once"),
        (forget_a_token, "a runs while decoding, 2 tokens behind"),
        (compute_while_waiting, "d waits while waiting, with 2 tokens computed"),
        (overrun, "d should have ended"),
        (lose_the_budget, "a step may run 0 of 24 tokens"),
        (plan_beyond_the_budget, "1 more sequences run than a step has tokens for"),
        (plan_beyond_the_budget, "plans 2 tokens, not 24"),
        (swap_the_queue, "out of order"),
    ],
)
def test_the_error_names_what_is_broken(
    engine: Engine, break_: Callable[[Engine], None], says: str
) -> None:
    break_(engine)
    with pytest.raises(InvariantError, match=says):
        engine.check()
