from itertools import product

import pytest

from deployments.contract.output import FinishReason
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.scheduling.sequence import (
    TRANSITIONS,
    IllegalTransitionError,
    Sequence,
    SequenceEvent,
    SequenceRequest,
    SequenceState,
)

PATHS: dict[SequenceState, list[SequenceEvent]] = {
    SequenceState.WAITING: [],
    SequenceState.PREFILLING: [SequenceEvent.ADMIT],
    SequenceState.DECODING: [SequenceEvent.ADMIT, SequenceEvent.PREFILLED],
    SequenceState.FINISHED: [SequenceEvent.FINISH],
}


def sequence(params: SamplingParams | None = None, generated: tuple[int, ...] = ()) -> Sequence:
    request = SequenceRequest("s", (5, 6, 7), params or SamplingParams(), generated)
    return Sequence(request, max_model_len=10, eos_token_ids=frozenset({1}))


def test_only_events_of_the_table_change_the_state() -> None:
    for state, event in product(SequenceState, SequenceEvent):
        seq = sequence()
        for step in PATHS[state]:
            seq.handle(step)
        following = TRANSITIONS.get((state, event))
        if following is None:
            with pytest.raises(IllegalTransitionError):
                seq.handle(event)
            following = state
        else:
            seq.handle(event)
        assert seq.state is following, (state, event)


@pytest.mark.parametrize(
    ("params", "generated", "token_id", "reason"),
    [
        (SamplingParams(), (), 9, None),
        (SamplingParams(), (), 1, FinishReason.STOP),
        (SamplingParams(ignore_eos=True), (), 1, None),
        (SamplingParams(stop_token_ids=frozenset({9})), (), 9, FinishReason.STOP),
        (SamplingParams(stop_token_ids=frozenset({9}), ignore_eos=True), (), 9, FinishReason.STOP),
        (SamplingParams(max_tokens=1), (), 9, FinishReason.LENGTH),
        (SamplingParams(max_tokens=1), (), 1, FinishReason.STOP),
        (SamplingParams(max_tokens=3), (8,), 9, None),
        (SamplingParams(max_tokens=3), (8, 8), 9, FinishReason.LENGTH),
        (SamplingParams(), (8,) * 6, 9, FinishReason.LENGTH),
    ],
)
def test_a_token_ends_the_sequence_by_stop_or_length(
    params: SamplingParams, generated: tuple[int, ...], token_id: int, reason: FinishReason | None
) -> None:
    assert sequence(params, generated).append(token_id) is reason


def test_tokens_that_end_the_sequence_are_barred_before_min_tokens() -> None:
    seq = sequence(SamplingParams(min_tokens=3, stop_token_ids=frozenset({9})), (8,))
    assert seq.barred_token_ids == {1, 9}
    seq.append(4)
    assert seq.barred_token_ids == {1, 9}
    seq.append(4)
    assert not seq.barred_token_ids


def test_an_ignored_end_is_not_barred() -> None:
    assert not sequence(SamplingParams(min_tokens=3, ignore_eos=True)).barred_token_ids


@pytest.mark.parametrize(
    ("params", "counts"),
    [
        (SamplingParams(), None),
        (SamplingParams(repetition_penalty=2), {5: 0, 6: 1, 7: 0, 8: 2}),
        (SamplingParams(presence_penalty=1), {6: 1, 8: 2}),
        (SamplingParams(frequency_penalty=1), {6: 1, 8: 2}),
    ],
)
def test_the_token_counts_hold_what_the_penalties_need_and_grow(
    params: SamplingParams, counts: dict[int, int] | None
) -> None:
    seq = sequence(params, (8, 6))
    seq.append(8)
    token_counts = seq.token_counts
    found = token_counts and dict(
        zip(token_counts.token_ids, token_counts.output_counts, strict=True)
    )
    assert found == counts


@pytest.mark.parametrize(
    ("events", "reason", "is_reusable"),
    [
        ([], FinishReason.ABORT, False),
        ([SequenceEvent.ADMIT], FinishReason.ABORT, False),
        ([SequenceEvent.ADMIT, SequenceEvent.PREFILLED], FinishReason.ABORT, True),
        ([SequenceEvent.ADMIT, SequenceEvent.PREFILLED], FinishReason.STOP, True),
        ([SequenceEvent.ADMIT, SequenceEvent.PREFILLED], FinishReason.ERROR, False),
    ],
)
def test_only_a_sequence_that_decoded_without_an_error_is_reusable(
    events: list[SequenceEvent], reason: FinishReason, is_reusable: bool
) -> None:
    request = SequenceRequest("s", (50, 51), SamplingParams())
    seq = Sequence(request, max_model_len=20, eos_token_ids=frozenset())
    for event in events:
        seq.handle(event)
    seq.finish(reason)
    assert seq.is_reusable is is_reusable


def test_a_sequence_is_not_reusable_after_a_failed_pass_until_it_waits_again() -> None:
    request = SequenceRequest("s", (50, 51), SamplingParams())
    seq = Sequence(request, max_model_len=20, eos_token_ids=frozenset())
    seq.admit()
    seq.has_uncounted_kv = True
    seq.preempt()
    assert not seq.has_uncounted_kv
    seq.admit()
    seq.handle(SequenceEvent.PREFILLED)
    seq.has_uncounted_kv = True
    seq.finish(FinishReason.ABORT)
    assert not seq.is_reusable


def test_a_resumed_sequence_counts_only_new_tokens_and_only_cached_prompt_tokens() -> None:
    request = SequenceRequest("s", (50, 51), SamplingParams(), (52, 53))
    seq = Sequence(request, max_model_len=20, eos_token_ids=frozenset())
    seq.admit(num_cached_tokens=3)
    assert (seq.num_computed_tokens, seq.num_cached_tokens) == (3, 2)
    assert seq.num_new_tokens == 0
    seq.append(54)
    assert seq.num_new_tokens == 1
