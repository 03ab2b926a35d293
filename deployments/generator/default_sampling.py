"""The defaults of the sampling parameters that a request does not set.

They come from the model's generation config, where it has a value.
"""

from dataclasses import replace
from typing import Any

from deployments.contract.sampling_params import InvalidParameterError, SamplingParams
from deployments.contract.unsupported_model import UnsupportedModelError


def default_sampling(generation_config: Any) -> SamplingParams:
    """Return the model's default sampling parameters.

    Files turn a parameter off in several ways: by null, by the value that changes nothing, and by 0
    or -1 where that means nothing. All are read as off.

    Args:
        generation_config: The model's generation config, in which any value may be missing; None if
            the model has none.

    Raises:
        UnsupportedModelError: A value is out of bounds, or no number; the message names it.
    """

    def above_zero(name: str, off: float) -> Any:
        value = getattr(generation_config, name, None)
        return off if value is None or value <= 0 else value

    temperature = getattr(generation_config, "temperature", None)
    if getattr(generation_config, "do_sample", None) is False:
        temperature = 0.0
    try:
        return SamplingParams(
            temperature=1.0 if temperature is None else temperature,
            top_k=int(above_zero("top_k", 0)),
            top_p=above_zero("top_p", 1.0),
            min_p=above_zero("min_p", 0.0),
            repetition_penalty=above_zero("repetition_penalty", 1.0),
        )
    except (InvalidParameterError, TypeError) as error:
        raise UnsupportedModelError(
            f"the model's generation_config.json can't be used: {error}"
        ) from error


def with_default_length(
    sampling: SamplingParams, default_max_tokens: int | None, num_tokens_left: int
) -> SamplingParams:
    """Return the sampling, with the default as `max_tokens` if the request sets none.

    The default is not a requirement: the answer gets fewer tokens if the model's length leaves
    fewer, and never ends before `min_tokens`.

    Args:
        sampling: The request's sampling parameters.
        default_max_tokens: The default; None means up to the model's length.
        num_tokens_left: Tokens that the model's length leaves after the prompt; may be negative.
    """
    if sampling.max_tokens is not None or default_max_tokens is None:
        return sampling
    max_tokens = max(default_max_tokens, sampling.min_tokens)
    if max_tokens >= num_tokens_left:
        return sampling
    return replace(sampling, max_tokens=max_tokens)
