from dataclasses import replace

import pytest

from deployments.contract.sampling_params import SamplingParams
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.vllm_engine.moves import Runner, hand_over, unsupported

RANDOM = SamplingParams(
    max_tokens=9,
    min_tokens=4,
    temperature=0.7,
    top_k=5,
    presence_penalty=0.5,
    logit_bias=((3, -2.0),),
    seed=11,
)


def request(params: SamplingParams, given: tuple[int, ...] = ()) -> SequenceRequest:
    return SequenceRequest("a", (5, 6, 7), params, given)


def test_v1_takes_the_delivered_tokens_as_prompt_and_counts_the_rest() -> None:
    handed = hand_over(request(RANDOM, (8, 9)), Runner.V1, 12)
    assert handed.prompt_token_ids == [5, 6, 7, 8, 9]
    assert handed.fields["max_tokens"] == 7
    assert handed.fields["min_tokens"] == 2
    assert handed.fields["extra_args"]["raystream"]["num_given"] == 2


def test_v1_leaves_the_choice_to_our_draws() -> None:
    fields = hand_over(request(RANDOM), Runner.V1, 12).fields
    assert fields["temperature"] == 0
    assert fields.keys() == {"temperature", "max_tokens", "min_tokens", "extra_args"}
    assert fields["extra_args"]["raystream"]["params"]["seed"] == 11


def test_v1_leaves_a_greedy_sequence_to_vllm() -> None:
    fields = hand_over(request(SamplingParams(temperature=0)), Runner.V1, 12).fields
    assert fields["extra_args"]["raystream"]["params"] is None


@pytest.mark.parametrize(
    "changed", [{"repetition_penalty": 1.2}, {"frequency_penalty": 1}, {"logit_bias": ((3, 2.0),)}]
)
def test_v1_draws_greedy_sequences_with_penalties_or_biases_itself(
    changed: dict[str, object],
) -> None:
    params = replace(SamplingParams(temperature=0), **changed)  # type: ignore[arg-type]
    asked = hand_over(request(params), Runner.V1, 12).fields["extra_args"]["raystream"]
    assert asked["params"] is not None


def test_v2_takes_the_delivered_tokens_as_output_and_counts_them() -> None:
    handed = hand_over(request(RANDOM, (8, 9)), Runner.V2, 12)
    assert handed.prompt_token_ids == [5, 6, 7]
    assert handed.fields["max_tokens"] == 9
    assert handed.fields["min_tokens"] == 4
    assert handed.fields["extra_args"] == {"raystream": {"delivered": [8, 9]}}


def test_v2_chooses_by_vllms_own_parameters() -> None:
    fields = hand_over(request(RANDOM), Runner.V2, 12).fields
    assert (fields["temperature"], fields["top_k"], fields["seed"]) == (0.7, 5, 11)
    assert fields["presence_penalty"] == 0.5
    assert fields["logit_bias"] == {3: -2.0}
    assert fields["extra_args"] == {}


def test_a_sequence_without_tokens_gets_one() -> None:
    params = SamplingParams(max_tokens=0)
    for runner in Runner:
        assert hand_over(request(params), runner, 3).fields["max_tokens"] == 1


def test_v2_names_what_its_kernel_can_not_hold() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=frozenset(range(121)))
    assert unsupported(params, Runner.V2) == "min_tokens with more than 120 stop_token_ids"
    assert unsupported(params, Runner.V1) is None
    assert unsupported(RANDOM, Runner.V2) is None
