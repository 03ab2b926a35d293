import pickle
from typing import Any

import pytest

from deployments.engine.sampling_params import MAX_SEED, InvalidParameterError, SamplingParams


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
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
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError, match=param) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(InvalidParameterError("too much", "top_k")))
    assert (error.message, error.param, str(error)) == ("too much", "top_k", "too much")
