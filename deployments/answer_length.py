"""How long an answer may get to a request that does not say."""

from dataclasses import replace

from deployments.contract import SamplingParams


def with_default_length(
    sampling: SamplingParams, default_max_tokens: int | None, num_tokens_left: int
) -> SamplingParams:
    """Return the sampling with `max_tokens` set, if neither it nor anything else forbids that.

    A default is no demand: where the model's length leaves less, the answer gets that, and it never
    ends before `min_tokens`.

    Args:
        sampling: What the request asks for.
        default_max_tokens: The default; None means up to the model's length.
        num_tokens_left: Of the model's length, behind the prompt. It may be negative.
    """
    if sampling.max_tokens is not None or default_max_tokens is None:
        return sampling
    max_tokens = max(default_max_tokens, sampling.min_tokens)
    if max_tokens >= num_tokens_left:
        return sampling
    return replace(sampling, max_tokens=max_tokens)
