from collections.abc import Callable

import pytest

from deployments.engine.engine import Engine
from deployments.engine.invariants import InvariantError
from deployments.engine.sampling_params import SamplingParams
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


def hold_two_slots(engine: Engine) -> None:
    engine._scheduler._table.running[2] = sequence(engine, "a")


def lose_a_slot(engine: Engine) -> None:
    engine.abort("c")
    engine._scheduler._table._free.pop()


def free_a_slot_twice(engine: Engine) -> None:
    engine.abort("c")
    engine._scheduler._table._free.append(None)


def run_and_wait(engine: Engine) -> None:
    engine._scheduler._waiting.append(sequence(engine, "a"))


def forget_a_token(engine: Engine) -> None:
    sequence(engine, "a").num_computed_tokens -= 1


def compute_while_waiting(engine: Engine) -> None:
    sequence(engine, "d").num_computed_tokens = 2


def overrun(engine: Engine) -> None:
    sequence(engine, "d").max_num_tokens = 3


def write_into_a_free_slot(engine: Engine) -> None:
    engine.abort("c")
    engine._kv.values[1][2, 7] = float("nan")


def write_after_the_end(engine: Engine) -> None:
    engine._kv.keys[2][0, 4] = 1e-9


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
        (hold_two_slots, "c is not scheduled"),
        (hold_two_slots, "a is scheduled more than once"),
        (lose_a_slot, "the slot table has 2 of 3 slots"),
        (free_a_slot_twice, "the slot table has 4 of 3 slots"),
        (run_and_wait, "a is scheduled more than once"),
        (forget_a_token, "a runs while decoding, 2 tokens behind"),
        (compute_while_waiting, "d waits while waiting, with 2 tokens computed"),
        (overrun, "d should have ended"),
        (write_into_a_free_slot, "slot 2 is not zero after token 0"),
        (write_after_the_end, "slot 0 is not zero after token 4"),
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
