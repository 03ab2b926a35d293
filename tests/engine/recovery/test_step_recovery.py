from collections.abc import Callable

import pytest
import torch

from deployments.contract.sampling_params import SamplingParams
from deployments.engine.model.runner import StepLogits
from deployments.engine.recovery import step_recovery
from deployments.engine.recovery.step_recovery import StepOutcome, StepRecovery
from deployments.engine.scheduling.scheduler import DecodeRow, PrefillChunk, StepPlan
from deployments.engine.scheduling.sequence import Sequence, SequenceRequest

CPU = torch.device("cpu")
SHORT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"


def sequence(name: str, *, has_images: bool = False) -> Sequence:
    inputs = {"pixel_values": torch.zeros(1)} if has_images else {}
    request = SequenceRequest(name, (5,) * 8, SamplingParams(), model_inputs=inputs)
    return Sequence(request, max_model_len=100, eos_token_ids=frozenset())


def decode(name: str, start: int) -> DecodeRow:
    return DecodeRow(sequence(name), (start,))


def chunk(name: str, start: int, end: int, *, has_images: bool = False) -> PrefillChunk:
    return PrefillChunk(sequence(name, has_images=has_images), (0,), start, end)


def sequences(plan: StepPlan) -> tuple[Sequence, ...]:
    return (*(row.sequence for row in plan.decode), *(c.sequence for c in plan.prefill))


def names(plan: StepPlan) -> str:
    return "".join(sequence.sequence_id for sequence in sequences(plan))


class Runner:
    """Runs plans without a model; every sequence is due."""

    def __init__(self, fault: Callable[[StepPlan], str | None]) -> None:
        self.fault = fault
        self.passes: list[str] = []

    def __call__(self, plan: StepPlan) -> StepLogits:
        self.passes.append(names(plan))
        what = self.fault(plan)
        if what is not None:
            raise RuntimeError(what)
        due = sequences(plan)
        return StepLogits(due, torch.zeros(len(due), 3))


def ran(outcome: StepOutcome) -> str:
    due = "".join(s.sequence_id for logits in outcome.logits for s in logits.sequences)
    rows = "".join(row.sequence.sequence_id for row in outcome.ran)
    assert sorted(due) == sorted(rows)
    return "".join(sorted(rows))


def errors(outcome: StepOutcome) -> dict[str, str]:
    return {sequence.sequence_id: why for sequence, why in outcome.failed}


def restarting(outcome: StepOutcome) -> str:
    return "".join(sequence.sequence_id for sequence in outcome.restarting)


def failing(*bad: str) -> Callable[[StepPlan], str | None]:
    return lambda plan: "bad" if any(name in names(plan) for name in bad) else None


def short_above(num_tokens: int) -> Callable[[StepPlan], str | None]:
    return lambda plan: SHORT if plan.num_tokens > num_tokens else None


def recovery(
    run: Callable[[StepPlan], StepLogits | None],
    full_context_length: int = 100,
    drop_captured: Callable[[], None] = lambda: None,
) -> StepRecovery:
    return StepRecovery(run, CPU, full_context_length, drop_captured)


MIXED = ((decode("a", 0), decode("b", 1)), (chunk("c", 0, 3), chunk("d", 0, 8, has_images=True)))


def test_text_runs_in_one_pass_and_images_in_their_own() -> None:
    runner = Runner(lambda _: None)
    outcome = recovery(runner).run(StepPlan(*MIXED))
    assert runner.passes == ["abc", "d"]
    assert (ran(outcome), outcome.failed, outcome.num_oom_tokens) == ("abcd", [], 0)


@pytest.mark.parametrize("bad", ["a", "b", "c", "d", "ac", "bd", "abcd"])
def test_bad_sequences_fail_and_the_others_run(bad: str) -> None:
    outcome = recovery(Runner(failing(*bad))).run(StepPlan(*MIXED))
    assert ran(outcome) == "".join(sorted(set("abcd") - set(bad)))
    assert errors(outcome) == dict.fromkeys(bad, "the model failed on this sequence")


def test_images_that_fail_cause_no_extra_pass_for_the_text() -> None:
    runner = Runner(failing("d"))
    recovery(runner).run(StepPlan(*MIXED))
    assert runner.passes == ["abc", "d"]


def test_one_bad_row_among_64_costs_at_most_eight_more_passes() -> None:
    rows = tuple(decode(chr(200 + i), i) for i in range(64))
    for row in rows:
        runner = Runner(failing(row.sequence.sequence_id))
        outcome = recovery(runner).run(StepPlan(rows, ()))
        assert (len(outcome.ran), len(outcome.failed)) == (63, 1)
        assert len(runner.passes) <= 1 + 6 + 2


def test_a_pass_out_of_memory_fails_no_sequence_and_reports_its_size() -> None:
    runner = Runner(short_above(2))
    outcome = recovery(runner).run(StepPlan(MIXED[0], MIXED[1][:1]))
    assert runner.passes == ["abc"]
    assert (ran(outcome), outcome.failed, outcome.num_oom_tokens) == ("", [], 5)


@pytest.mark.parametrize(
    ("fault", "num_releases"), [(short_above(2), 1), (short_above(0), 2), (failing("a"), 0)]
)
def test_the_devices_cache_is_emptied_when_memory_is_short_and_only_then(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[StepPlan], str | None], num_releases: int
) -> None:
    released: list[torch.device] = []
    monkeypatch.setattr(step_recovery, "release_cache", released.append)
    plan = StepPlan(MIXED[0], (MIXED[1][0], chunk("i", 0, 2, has_images=True)))
    recovery(Runner(fault)).run(plan)
    assert released == [CPU] * num_releases


def test_other_passes_of_a_step_survive_one_out_of_memory() -> None:
    runner = Runner(lambda plan: SHORT if plan.decode else None)
    outcome = recovery(runner).run(StepPlan(*MIXED))
    assert (ran(outcome), outcome.num_oom_tokens) == ("d", 5)


@pytest.mark.parametrize(
    "row", [decode("a", 0), chunk("a", 7, 8), chunk("a", 0, 8, has_images=True)]
)
def test_a_row_that_cannot_be_smaller_is_tried_twice_and_then_fails(
    row: DecodeRow | PrefillChunk,
) -> None:
    plan = StepPlan((row,), ()) if isinstance(row, DecodeRow) else StepPlan((), (row,))
    runner = Runner(short_above(0))
    outcome = recovery(runner).run(plan)
    assert runner.passes == ["a", "a"]
    assert errors(outcome) == {"a": "there is not enough memory for this sequence"}
    assert outcome.num_oom_tokens == 0


def test_a_retry_that_succeeds_counts() -> None:
    answers = iter([SHORT, None])
    outcome = recovery(Runner(lambda _: next(answers))).run(StepPlan((decode("a", 0),), ()))
    assert (ran(outcome), outcome.failed) == ("a", [])


def test_a_retry_has_the_memory_that_captured_steps_held() -> None:
    events: list[str] = []

    def run(plan: StepPlan) -> StepLogits:
        events.append(names(plan))
        if "drop" not in events:
            raise torch.OutOfMemoryError
        return StepLogits(sequences(plan), torch.zeros(1, 3))

    outcome = recovery(run, drop_captured=lambda: events.append("drop")).run(
        StepPlan((decode("a", 0),), ())
    )
    assert (ran(outcome), events) == ("a", ["a", "drop", "a"])


def test_a_pass_that_can_be_smaller_leaves_captured_steps_alone() -> None:
    dropped: list[str] = []
    runner = Runner(short_above(2))
    outcome = recovery(runner, drop_captured=lambda: dropped.append("all")).run(
        StepPlan(MIXED[0], MIXED[1][:1])
    )
    assert (outcome.num_oom_tokens, dropped) == (5, [])


def test_a_chunk_that_runs_out_of_memory_during_bisection_does_not_fail() -> None:
    def fault(plan: StepPlan) -> str | None:
        if len(plan.decode) + len(plan.prefill) > 1:
            return "together they fail"
        return short_above(2)(plan)

    outcome = recovery(Runner(fault)).run(StepPlan(MIXED[0], MIXED[1][:1]))
    assert (ran(outcome), outcome.failed, outcome.num_oom_tokens) == ("ab", [], 3)


def test_all_rows_of_a_failed_pass_are_marked_as_having_uncounted_kv() -> None:
    chunks = (chunk("c", 0, 3), chunk("d", 0, 8, has_images=True))
    plan = StepPlan((decode("a", 0), decode("b", 1)), chunks)
    recovery(Runner(failing("d"))).run(plan)
    assert [sequence.has_uncounted_kv for sequence in sequences(plan)] == [
        False,
        False,
        False,
        True,
    ]
    recovery(Runner(failing("c"))).run(plan)
    assert all(sequence.has_uncounted_kv for sequence in sequences(plan))


def test_where_rings_overwrite_continued_chunks_restart_and_then_run_alone() -> None:
    plan = StepPlan((decode("a", 0),), (chunk("c", 3, 6), chunk("d", 0, 6), chunk("e", 7, 8)))
    outcome = recovery(Runner(failing("c")), 5).run(plan)
    assert (ran(outcome), restarting(outcome), outcome.failed) == ("ade", "c", [])
    runner = Runner(failing("c"))
    outcome = recovery(runner, 5).run(plan)
    assert runner.passes == ["ade", "c"]
    assert (ran(outcome), restarting(outcome), list(errors(outcome))) == ("ade", "", ["c"])


def test_where_rings_overwrite_a_chunk_out_of_memory_restarts() -> None:
    plan = StepPlan((decode("a", 0),), (chunk("c", 3, 6), chunk("d", 0, 6)))
    outcome = recovery(Runner(short_above(5)), 5).run(plan)
    assert (ran(outcome), restarting(outcome), outcome.num_oom_tokens) == ("", "c", 10)
    assert not plan.prefill[0].sequence.is_suspect


def test_a_device_that_is_gone_fails_no_sequence() -> None:
    def gone(_: StepPlan) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError):
        recovery(gone).run(StepPlan(*MIXED))
