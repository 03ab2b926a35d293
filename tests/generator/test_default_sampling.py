import pytest

from deployments.contract import SamplingParams
from deployments.generator.default_sampling import with_default_length


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
