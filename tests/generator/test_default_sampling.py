from typing import Any

import pytest
from transformers import GenerationConfig

from deployments.contract.sampling_params import SamplingParams
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.generator.default_sampling import default_sampling, with_default_length


def sampling_of(**values: Any) -> SamplingParams:
    return default_sampling(GenerationConfig.from_dict({"do_sample": True, **values}))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("top_k", (None, 0, -1)),
        ("top_p", (None, 1, 1.0, 0, -1)),
        ("min_p", (None, 0, 0.0, -1)),
        ("repetition_penalty", (None, 1, 1.0, 0, -1)),
        ("temperature", (None, 1.0)),
    ],
)
def test_each_way_to_turn_a_parameter_off_is_read_as_off(
    name: str, values: tuple[float | None, ...]
) -> None:
    for value in values:
        assert sampling_of(**{name: value}) == SamplingParams(), value


def test_a_temperature_of_zero_is_greedy_and_so_is_a_model_that_does_not_sample() -> None:
    assert sampling_of(temperature=0) == SamplingParams(temperature=0)
    assert sampling_of(temperature=0.7, do_sample=False) == SamplingParams(temperature=0)


def test_values_that_are_on_are_the_defaults() -> None:
    values = {
        "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1,
    }  # fmt: skip
    assert sampling_of(**values) == SamplingParams(**values)  # type: ignore[arg-type] # a mapping
    assert default_sampling(None) == SamplingParams()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"temperature": 3.0}, "temperature must be from 0 to 2"),
        ({"temperature": -1.0}, "temperature must be from 0 to 2"),
        ({"top_p": 1.5}, "top_p must be above 0, at most 1"),
        ({"top_k": "fifty"}, "not supported between"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_file(values: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"generation_config\.json .*{told}"):
        sampling_of(**values)


@pytest.mark.parametrize(
    ("asked", "min_tokens", "default", "num_tokens_left", "max_tokens"),
    [
        (None, 0, 16, 100, 16),
        (5, 0, 16, 100, 5),
        (40, 0, 16, 100, 40),
        (None, 0, None, 100, None),
        (None, 20, 16, 100, 20),
        # Fewer tokens are left, and None means all of them.
        (None, 0, 16, 16, None),
        (None, 0, 16, 3, None),
        (None, 0, 16, -3, None),
        (None, 20, 16, 10, None),
    ],
)
def test_the_default_length_yields_to_the_request_min_tokens_and_the_model_s_length(
    asked: int | None,
    min_tokens: int,
    default: int | None,
    num_tokens_left: int,
    max_tokens: int | None,
) -> None:
    sampling = SamplingParams(max_tokens=asked, min_tokens=min_tokens)
    assert with_default_length(sampling, default, num_tokens_left).max_tokens == max_tokens
