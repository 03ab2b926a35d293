"""Which tokens may be drawn, and how likely each is: temperature, min_p, top_k and top_p.

A parameter costs the rows that use it, and no other. A row that keeps only its likeliest tokens is
cut to a list of them; the others keep the whole vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch

from deployments.engine.largest import find_largest
from deployments.engine.sampling_params import SamplingParams

SHORT_LIST = 256
"""Rows with a top_k up to this are cut together, the others by themselves, not to lengthen all
lists. And among so many likeliest tokens a nucleus is looked for; where it is wider, and only
there, the whole vocabulary is sorted."""

MIN_TEMPERATURE = 1e-5
"""Below this, float32 could not tell a positive temperature from 0; it is as good as greedy."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may be drawn in some of the rows.

    Attributes:
        rows: Which m rows these are.
        weights: [m, c], float32: how likely each token is, as a part of how likely the row's
            likeliest is; 0 for what may not be drawn.
        token_ids: [m, c], int64, in ascending order; None if c is the whole vocabulary.
    """

    rows: list[int]
    weights: torch.Tensor
    token_ids: torch.Tensor | None


def find_candidates(
    logits: torch.Tensor, maxima: torch.Tensor, params: Sequence[SamplingParams]
) -> list[Candidates]:
    """Return what may be drawn; each row is in one of the groups.

    min_p and top_k may change places: the likeliest token, which min_p measures by, is always
    among the k likeliest. top_p comes last, and measures by what the others have left. Of equally
    likely tokens those of lower ids are kept.

    Args:
        logits: [n, vocab], float32, on the model's device. They are changed in place.
        maxima: [n], the largest logit of each row, all finite.
        params: How to sample each of the n rows, all at temperatures above 0.
    """
    temperatures = _column([max(p.temperature, MIN_TEMPERATURE) for p in params], logits)
    scaled = logits.sub_(maxima[:, None]).div_(temperatures)
    short = [at for at, p in enumerate(params) if 0 < p.top_k <= SHORT_LIST]
    long = [at for at, p in enumerate(params) if p.top_k > SHORT_LIST]
    nucleus = [at for at, p in enumerate(params) if p.top_k == 0 and p.top_p < 1]
    wide = [at for at, p in enumerate(params) if p.top_k == 0 and p.top_p == 1]
    found = [_keep_top_k(scaled, rows, params) for rows in (short, long) if rows]
    if nucleus:
        found += _keep_nuclei(scaled, nucleus, params)
    if wide:
        found.append(Candidates(wide, _weigh(scaled, wide, params), None))
    return found


def _keep_top_k(
    scaled: torch.Tensor, rows: list[int], params: Sequence[SamplingParams]
) -> Candidates:
    num = min(max(params[at].top_k for at in rows), scaled.shape[-1])
    weights, token_ids = _largest(scaled, rows, params, num)
    return _cut(rows, weights, token_ids, params, weights.sum(dim=-1, dtype=torch.float64))


def _keep_nuclei(
    scaled: torch.Tensor, rows: list[int], params: Sequence[SamplingParams]
) -> list[Candidates]:
    totals = _weigh(scaled.clone(), rows, params).sum(dim=-1, dtype=torch.float64)
    goals = totals * _top_p(rows, params, totals)
    num = min(SHORT_LIST, scaled.shape[-1])
    weights, token_ids = _largest(scaled, rows, params, num)
    is_inside = (weights.sum(dim=-1, dtype=torch.float64) >= goals).tolist()
    if all(is_inside):
        return [_cut(rows, weights, token_ids, params, totals)]
    found = []
    for wanted, num_sorted in ((True, num), (False, scaled.shape[-1])):
        part = [i for i, inside in enumerate(is_inside) if inside is wanted]
        if part:
            chosen = [rows[i] for i in part]
            weights, token_ids = _largest(scaled, chosen, params, num_sorted)
            found.append(_cut(chosen, weights, token_ids, params, totals[part]))
    return found


def _largest(
    scaled: torch.Tensor, rows: list[int], params: Sequence[SamplingParams], num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the ids of the likeliest tokens, the likeliest first: [m, num]."""
    values = scaled if len(rows) == len(scaled) else scaled[rows]
    token_ids = find_largest(values, num)
    weights = values.gather(-1, token_ids).exp_()
    limits = _column([params[at].top_k or num for at in rows], weights)
    ranks = torch.arange(num, device=weights.device)
    min_p = _column([params[at].min_p for at in rows], weights)
    return weights.masked_fill_((weights < min_p) | (ranks >= limits), 0.0), token_ids


def _cut(
    rows: list[int],
    weights: torch.Tensor,
    token_ids: torch.Tensor,
    params: Sequence[SamplingParams],
    totals: torch.Tensor,
) -> Candidates:
    """Apply top_p to lists with the likeliest first; `totals` [m] are the weights of all."""
    top_p = _top_p(rows, params, totals)
    goals = (totals * top_p).masked_fill_(top_p == 1, inf)
    # The first one always stays: nothing comes before it.
    before = weights.cumsum(dim=-1, dtype=torch.float64) - weights
    weights = weights.masked_fill(before >= goals[:, None], 0.0)
    token_ids, order = token_ids.sort(dim=-1)
    return Candidates(rows, weights.gather(-1, order), token_ids)


def _weigh(scaled: torch.Tensor, rows: list[int], params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the weights of the whole vocabulary after min_p, in place where no row is left out."""
    weights = (scaled if len(rows) == len(scaled) else scaled[rows]).exp_()
    chosen = [i for i, at in enumerate(rows) if params[at].min_p > 0]
    if chosen:
        some = weights if len(chosen) == len(rows) else weights[chosen]
        some.masked_fill_(some < _column([params[rows[i]].min_p for i in chosen], some), 0.0)
        if some is not weights:
            weights[chosen] = some
    return weights


def _top_p(rows: list[int], params: Sequence[SamplingParams], totals: torch.Tensor) -> torch.Tensor:
    """Return each row's top_p: [m], in float64, where no value above 0 becomes 0."""
    return torch.tensor(
        [params[at].top_p for at in rows], dtype=torch.float64, device=totals.device
    )


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return the values as [m, 1], of the type and on the device of the other tensor."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
