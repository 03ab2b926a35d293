import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from deployments.contract.sampling_params import (
    MAX_SEED,
    InvalidParameterError,
    SamplingParams,
    derive_seed,
    uniform,
)

OUT_OF_BOUNDS: Sequence[tuple[str, Any]] = [
    ("max_tokens", -1),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", float("nan")),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", float("inf")),
    ("seed", -1),
    ("seed", MAX_SEED + 1),
    ("stop", ("",)),
    ("stop", ("x",) * 17),
    ("min_tokens", -1),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", float("nan")),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 101.0),
    ("repetition_penalty", float("nan")),
    ("presence_penalty", -2.1),
    ("presence_penalty", float("inf")),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", float("nan")),
    ("logit_bias", ((0, 100.1),)),
    ("logit_bias", ((0, float("-inf")),)),
    ("logit_bias", ((0, float("nan")),)),
    ("logit_bias", ((-1, 1.0),)),
    ("logit_bias", ((1, 1.0), (1, 2.0))),
    ("logit_bias", tuple((i, 0.0) for i in range(1025))),
    ("stop_token_ids", frozenset({-1})),
    ("top_logprobs", -1),
    ("top_logprobs", 21),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
]


def refusal(param: str, value: Any) -> InvalidParameterError | None:
    try:
        SamplingParams(**{param: value})
    except InvalidParameterError as error:
        return error
    return None


def test_a_value_out_of_bounds_is_refused_by_name() -> None:
    offenders = [
        (param, value)
        for param, value in OUT_OF_BOUNDS
        if (error := refusal(param, value)) is None
        or error.param != param
        or param not in str(error)
    ]
    assert offenders == []


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="at most max_tokens, which is 3") as caught:
        SamplingParams(min_tokens=4, max_tokens=3)
    assert caught.value.param == "min_tokens"


def test_the_first_answer_keeps_the_params_and_the_others_differ_only_by_seed() -> None:
    params = SamplingParams(temperature=0.5, seed=7, stop=("x",))
    assert params.of_choice(0) == params
    assert params.of_choice(1).seed != params.of_choice(2).seed
    assert replace(params.of_choice(1), seed=7) == params


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(InvalidParameterError("too much", "top_k")))
    assert (error.message, error.param, str(error)) == ("too much", "top_k", "too much")


def test_random_numbers_are_uniform_and_differ_by_seed_and_position() -> None:
    by_position = torch.tensor([uniform(1, position) for position in range(4000)])
    by_seed = torch.tensor([uniform(seed, 1) for seed in range(4000)])
    by_choice = torch.tensor([uniform(derive_seed(5, index), 1) for index in range(4000)])
    for numbers in (by_position, by_seed, by_choice):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        histogram = torch.histc(numbers, bins=10, min=0, max=1)
        assert (histogram - 400).abs().max() < 80
    assert abs(float(torch.corrcoef(torch.stack([by_position, by_seed]))[0, 1])) < 0.06


def test_the_first_answer_keeps_the_seed_and_the_others_share_none() -> None:
    seeds = [derive_seed(seed, index) for seed in range(50) for index in range(16)]
    assert seeds[::16] == list(range(50))
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
