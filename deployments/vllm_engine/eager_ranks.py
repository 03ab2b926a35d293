"""Computes the ranks of log-probabilities without a compiler.

vLLM's model runner V1 compiles one small function when the first request asks for
log-probabilities. That takes 7 to 43 seconds in which every stream stands, and without a C++
compiler it ends the engine. Run as it is written, the function takes microseconds.

Source: vllm/v1/sample/ops/logprobs.py of vLLM 0.32.
"""

import torch
from vllm.v1.sample import sampler


def count_at_least(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return how many numbers of each row are at least the row's value.

    Args:
        x: [rows, n].
        values: [rows, 1].

    Returns:
        [rows], int64.
    """
    return (x >= values).sum(-1)


def rank_eagerly() -> None:
    """Put the function in the place of vLLM's in this process."""
    sampler.batched_count_greater_than = count_at_least
