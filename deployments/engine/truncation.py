"""Which tokens of a row may be drawn, and how likely each is: temperature, min_p, top_k and top_p.

A parameter costs the rows that use it, and no other.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from deployments.engine.sampling_row import SamplingRow

Number = TypeVar("Number", int, float)

NUCLEUS_CANDIDATES = 1024
"""Likeliest tokens that are sorted first for top_p; the whole vocabulary is sorted only when the
nucleus does not lie within them."""

MIN_TEMPERATURE = 1e-5
"""Below this, float32 could not tell a positive temperature from 0; it is as good as greedy."""


def weigh(logits: torch.Tensor, maxima: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Return how likely each token is, as a part of how likely the likeliest is.

    min_p and top_k may change places: the likeliest token, which min_p measures by, is always
    among the k likeliest. top_p comes last, and measures by what the others have left. Where
    tokens are exactly as likely as the last one kept, by top_k or by top_p, all of them are.

    Args:
        logits: [n, vocab], float32, on the model's device; no row's maximum is infinite or NaN.
        maxima: [n], the largest logit of each row.
        rows: How to sample each of the n rows, all at temperatures above 0.

    Returns:
        [n, vocab], float32, on the same device: 1 for the likeliest, 0 for what may not be drawn.
    """
    temperatures = _column([max(row.params.temperature, MIN_TEMPERATURE) for row in rows], logits)
    weights = (logits - maxima[:, None]).div_(temperatures)
    params = [row.params for row in rows]
    weights = _change(weights, [p.top_k for p in params], 0, _keep_top_k).exp_()
    weights = _change(weights, [p.min_p for p in params], 0, _keep_min_p)
    limits = [p.top_k or NUCLEUS_CANDIDATES for p in params if p.top_p < 1]
    num_candidates = max(min(limit, NUCLEUS_CANDIDATES) for limit in limits) if limits else 0

    def keep_top_p(weights: torch.Tensor, top_p: Sequence[float]) -> torch.Tensor:
        return _keep_top_p(weights, top_p, num_candidates)

    return _change(weights, [p.top_p for p in params], 1, keep_top_p)


def _change(
    weights: torch.Tensor,
    values: Sequence[Number],
    off: Number,
    change: Callable[[torch.Tensor, Sequence[Number]], torch.Tensor],
) -> torch.Tensor:
    """Change the rows whose value is not the one that asks for nothing."""
    chosen = [at for at, value in enumerate(values) if value != off]
    if not chosen:
        return weights
    if len(chosen) == len(values):
        return change(weights, values)
    weights[chosen] = change(weights[chosen], [values[at] for at in chosen])
    return weights


def _keep_top_k(scaled: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    """Set all but each row's k largest values to -inf."""
    limits = [min(k, scaled.shape[-1]) for k in top_k]
    largest = scaled.topk(max(limits), dim=-1).values
    threshold = largest.gather(-1, torch.tensor(limits, device=scaled.device)[:, None] - 1)
    return scaled.masked_fill_(scaled < threshold, -torch.inf)


def _keep_min_p(weights: torch.Tensor, min_p: Sequence[float]) -> torch.Tensor:
    """Zero what is less likely than its part of the likeliest, whose weight is 1."""
    return weights.masked_fill_(weights < _column(min_p, weights), 0.0)


def _keep_top_p(weights: torch.Tensor, top_p: Sequence[float], num_candidates: int) -> torch.Tensor:
    """Zero what lies outside each row's nucleus."""
    goals = weights.sum(dim=-1, keepdim=True, dtype=torch.float64) * _column(top_p, weights)
    candidates = weights.topk(min(num_candidates, weights.shape[-1]), dim=-1).values.double()
    if not bool((candidates.sum(dim=-1, keepdim=True) >= goals).all()):
        candidates = weights.sort(dim=-1, descending=True).values.double()
    before = candidates.cumsum(dim=-1) - candidates
    # The first candidate always stays: nothing comes before it.
    num_kept = (before < goals).sum(dim=-1, keepdim=True).clamp(min=1)
    threshold = candidates.gather(-1, num_kept - 1).float()
    return weights.masked_fill_(weights < threshold, 0.0)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return the values as [n, 1], of the type and on the device of the other tensor."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
