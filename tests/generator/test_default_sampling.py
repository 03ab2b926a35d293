import pytest

from deployments.answer_length import with_default_length
from deployments.contract import SamplingParams


@pytest.mark.parametrize(
    ("asked", "min_tokens", "default", "num_tokens_left", "max_tokens"),
    [
        (None, 0, 16, 100, 16),
        (5, 0, 16, 100, 5),
        (40, 0, 16, 100, 40),
        (None, 0, None, 100, None),
        (None, 20, 16, 100, 20),
        # What is left is less, and `None` is all of it.
        (None, 0, 16, 16, None),
        (None, 0, 16, 3, None),
        (None, 0, 16, -3, None),
        (None, 20, 16, 10, None),
    ],
)
def test_a_default_is_the_length_unless_something_else_says_more_or_less(
    asked: int | None,
    min_tokens: int,
    default: int | None,
    num_tokens_left: int,
    max_tokens: int | None,
) -> None:
    sampling = SamplingParams(max_tokens=asked, min_tokens=min_tokens)
    assert with_default_length(sampling, default, num_tokens_left).max_tokens == max_tokens
