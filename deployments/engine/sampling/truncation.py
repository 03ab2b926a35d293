"""Finds which tokens may be drawn, and their weights: min_p, top_k and top_p.

A parameter costs time only in the rows that use it. Rows that keep only their likeliest tokens are
reduced to a list of them; the other rows keep the whole vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

import torch

from deployments.compute.host_to_device import take_rows, to_device
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.sampling.block_reductions import sums_of_rows
from deployments.engine.sampling.stable_top_k import stable_top_k

SHORT_LIST = 128
"""Rows with a top_k up to this are truncated together, and rows with a larger one separately, so
that one long list does not lengthen all lists. A top_p nucleus is also first looked for among this
many tokens; the whole vocabulary is sorted only if the nucleus is wider."""

SORTED_AT_ONCE = 4
"""How many rows with long lists are sorted together. Sorting a vocabulary takes about ten times the
memory of its logits, and a step's memory is planned for far less."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that may be drawn in some of the rows.

    Attributes:
        rows: Indices of these m rows.
        weights: [m, c], float32: each token's probability relative to the row's likeliest token; 0
            if it may not be drawn.
        token_ids: [m, c], int64, in ascending order; None if c is the whole vocabulary.
        is_complete: [m], bool: whether a row has all tokens that may be drawn; None if all have.
    """

    rows: list[int]
    weights: torch.Tensor
    token_ids: torch.Tensor | None
    is_complete: torch.Tensor | None = None


class KeepNuclei(Protocol):
    """Finds the nuclei of rows that have a top_p without a top_k."""

    def __call__(self, group: "_Group") -> list[Candidates]:
        """Return the rows' candidates, in groups."""
        ...


def find_candidates(
    scaled: torch.Tensor, params: Sequence[SamplingParams], keep_nuclei: KeepNuclei
) -> list[Candidates]:
    """Return the tokens that may be drawn; each row is in exactly one of the groups.

    The order of min_p and top_k does not matter: min_p is relative to the likeliest token, which is
    always among the k likeliest. top_p comes last and is relative to what the other two have left.
    Of equally likely tokens, those with lower ids are kept.

    Args:
        scaled: [n, vocab], float32, on the model's device: each row's (logits - maximum) /
            temperature. They are changed in place.
        params: How to sample each of the n rows, all at temperatures above 0.
        keep_nuclei: One of `read_nuclei`, `guess_nuclei` and `whole_nuclei`.
    """
    short = [at for at, p in enumerate(params) if 0 < p.top_k <= SHORT_LIST]
    long = [at for at, p in enumerate(params) if p.top_k > SHORT_LIST]
    nucleus = [at for at, p in enumerate(params) if p.top_k == 0 and p.top_p < 1]
    wide = [at for at, p in enumerate(params) if p.top_k == 0 and p.top_p == 1]
    lists = [short, *_split(long)] if short else _split(long)
    found = [_keep_top_k(_Group(scaled, rows, params)) for rows in lists]
    if nucleus:
        found += keep_nuclei(_Group(scaled, nucleus, params))
    if wide:
        group = _Group(scaled, wide, params)
        # In place: the scaled logits, copied or not, are not used again.
        weights = group.scaled.exp_()
        found.append(Candidates(wide, _keep_min_p(weights, group.params), None))
    return found


class _Group:
    """Some of the rows, and how to sample them; `all_scaled` and `all_params` have all n rows."""

    def __init__(
        self, all_scaled: torch.Tensor, rows: list[int], all_params: Sequence[SamplingParams]
    ) -> None:
        self._all = all_scaled, all_params
        self.rows = rows
        self.params = [all_params[at] for at in rows]
        self.vocab_size = all_scaled.shape[-1]

    @property
    def scaled(self) -> torch.Tensor:
        """The rows' (logits - maximum) / temperature, [m, vocab]; a copy unless m is n."""
        scaled, _ = self._all
        return scaled if len(self.rows) == len(scaled) else take_rows(scaled, self.rows)

    @property
    def top_p(self) -> torch.Tensor:
        """The rows' top_p, [m], in float64, in which no positive value becomes 0."""
        values = [p.top_p for p in self.params]
        return to_device(values, self._all[0].device, torch.float64)

    def part(self, indices: Sequence[int]) -> "_Group":
        """Return a group of some of these rows."""
        scaled, params = self._all
        return _Group(scaled, [self.rows[i] for i in indices], params)


def _keep_top_k(group: _Group) -> Candidates:
    num = min(max(p.top_k for p in group.params), group.vocab_size)
    weights, token_ids = _weigh_largest(group, num)
    return _cut(group, weights, token_ids, weights.sum(dim=-1, dtype=torch.float64))


def read_nuclei(group: _Group) -> list[Candidates]:
    """Return the nuclei; reads on the host which of them are wider than a short list."""
    weights, token_ids, totals, is_inside = _short_lists(group)
    inside = is_inside.tolist()
    narrow = [i for i in range(len(inside)) if inside[i]]
    found = []
    if narrow:
        some = (take_rows(tensor, narrow) for tensor in (weights, token_ids, totals))
        found.append(_cut(group.part(narrow), *some))
    wide = [i for i in range(len(inside)) if not inside[i]]
    return found + _sorted_nuclei(group, wide, totals)


def guess_nuclei(group: _Group) -> list[Candidates]:
    """Return the nuclei without a read: of many rows, short lists that may be incomplete."""
    if len(group.rows) <= SORTED_AT_ONCE:
        return whole_nuclei(group)
    weights, token_ids, totals, is_inside = _short_lists(group)
    return [replace(_cut(group, weights, token_ids, totals), is_complete=is_inside)]


def whole_nuclei(group: _Group) -> list[Candidates]:
    """Return the nuclei, sorting the whole vocabulary, without a read on the host."""
    return _sorted_nuclei(group, list(range(len(group.rows))), _totals(group))


def _totals(group: _Group) -> torch.Tensor:
    """Return the sum of each row's weights after min_p, [m], float64."""
    return sums_of_rows(_keep_min_p(group.scaled.exp(), group.params))


def _short_lists(
    group: _Group,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return weights and ids of the likeliest tokens, totals, and whether nuclei are among them."""
    totals = _totals(group)
    weights, token_ids = _weigh_largest(group, min(SHORT_LIST, group.vocab_size))
    is_inside = weights.sum(dim=-1, dtype=torch.float64) >= totals * group.top_p
    return weights, token_ids, totals, is_inside


def _sorted_nuclei(group: _Group, rows: list[int], totals: torch.Tensor) -> list[Candidates]:
    """Return the nuclei of some of a group's rows; `totals` has those of all, [m]."""
    return [
        _cut(part, *_weigh_largest(part, group.vocab_size), take_rows(totals, some))
        for some in _split(rows)
        for part in (group.part(some),)
    ]


def _keep_min_p(weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Zero the weights below each row's min_p, in place, and return them: [m, vocab]."""
    chosen = [i for i, p in enumerate(params) if p.min_p > 0]
    limits = _column([params[i].min_p for i in chosen], weights)
    if len(chosen) == len(params):
        return weights.masked_fill_(weights < limits, 0.0)
    if chosen:
        at = to_device(chosen, weights.device, torch.int64)
        some = weights.index_select(0, at)
        weights.index_copy_(0, at, some.masked_fill_(some < limits, 0.0))
    return weights


def _weigh_largest(group: _Group, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights after min_p and top_k, and ids, of the likeliest tokens: [m, num] each.

    The likeliest comes first.
    """
    scaled = group.scaled
    token_ids = stable_top_k(scaled, num)
    weights = scaled.gather(-1, token_ids).exp_()
    # A client's top_k may be too large for a tensor's dtype.
    limits = _column([min(p.top_k or num, num) for p in group.params], weights)
    ranks = torch.arange(num, device=weights.device)
    min_p = _column([p.min_p for p in group.params], weights)
    return weights.masked_fill_((weights < min_p) | (ranks >= limits), 0.0), token_ids


def _cut(
    group: _Group, weights: torch.Tensor, token_ids: torch.Tensor, totals: torch.Tensor
) -> Candidates:
    """Apply top_p to lists that start with the likeliest token, then sort them by token id.

    Args:
        group: m rows.
        weights: [m, num], after min_p and top_k.
        token_ids: [m, num].
        totals: [m], float64: the sum of the weights over the whole vocabulary.
    """
    goals = (totals * group.top_p).masked_fill_(group.top_p == 1, inf)
    # The first token always stays: the sum before it is 0.
    before = weights.cumsum(dim=-1, dtype=torch.float64) - weights
    weights = weights.masked_fill(before >= goals[:, None], 0.0)
    if token_ids.shape[-1] == group.vocab_size:
        in_order = torch.empty_like(weights).scatter_(-1, token_ids, weights)
        return Candidates(group.rows, in_order, None)
    token_ids, order = token_ids.sort(dim=-1)
    return Candidates(group.rows, weights.gather(-1, order), token_ids)


def _split(rows: list[int]) -> list[list[int]]:
    return [rows[at : at + SORTED_AT_ONCE] for at in range(0, len(rows), SORTED_AT_ONCE)]


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return the values as [m, 1], with the dtype and device of `like`."""
    return to_device(values, like.device, like.dtype)[:, None]
