"""From logits to the next token of each sequence.

Each row is sampled by one random number that depends on its own (seed, position) alone, and by an
inverse of the cumulative distribution in the vocabulary's order. So a sequence's tokens depend
neither on its neighbours nor on having been resumed elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deployments.engine.sampling_params import SamplingParams

NUCLEUS_CANDIDATES = 1024
"""Likeliest tokens that are sorted first for top_p; the whole vocabulary is sorted only when the
nucleus does not lie within them."""

MIN_TEMPERATURE = 1e-5
"""Below this, float32 could not tell a positive temperature from 0; it is as good as greedy."""

_MASK64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row of logits: how to sample it, and the position of the token that it will become."""

    params: SamplingParams
    position: int


def uniform(seed: int, position: int) -> float:
    """Return the random number of (seed, position), uniform in [0, 1).

    Source: the output function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom
    number generators, 2014), applied to the seed and then to the position.
    """
    return (_mix64(_mix64(seed) + position) >> 11) * 2.0**-53


def _mix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """Choose the next token of each row.

    Args:
        logits: [n, vocab], float32, on the model's device.
        rows: How to sample each of the n rows.

    Returns:
        A token id for each row, or None where the logits are not finite.
    """
    is_sound = logits.amax(dim=-1).isfinite().tolist()
    token_ids: list[int] = logits.argmax(dim=-1).tolist()
    random = [i for i, row in enumerate(rows) if row.params.temperature > 0 and is_sound[i]]
    if random:
        chosen = _sample_random(logits[random], [rows[i] for i in random])
        for i, token_id in zip(random, chosen, strict=True):
            token_ids[i] = token_id
    return [token_ids[i] if sound else None for i, sound in enumerate(is_sound)]


def _sample_random(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    temperatures = column(
        [max(row.params.temperature, MIN_TEMPERATURE) for row in rows], torch.float32
    )
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures
    if any(row.params.top_k for row in rows):
        scaled = _keep_top_k(scaled, [row.params.top_k for row in rows])
    probabilities = scaled.softmax(dim=-1)
    if any(row.params.top_p < 1 for row in rows):
        top_p = column([row.params.top_p for row in rows], torch.float32)
        probabilities = _keep_top_p(probabilities, top_p)
    cumulative = probabilities.double().cumsum(dim=-1)
    numbers = column([uniform(row.params.seed, row.position) for row in rows], torch.float64)
    # `right` finds the first entry above the number, so one of probability 0 is never chosen.
    chosen = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    token_ids: list[int] = chosen[:, 0].tolist()
    return token_ids


def _keep_top_k(scaled: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    """Set all but each row's k largest values to -inf; a k of 0 keeps all."""
    limits = [min(k, scaled.shape[-1]) for k in top_k]
    largest = scaled.topk(max(limits), dim=-1).values
    limit = torch.tensor(limits, device=scaled.device)[:, None]
    threshold = largest.gather(-1, (limit - 1).clamp(min=0)).masked_fill(limit == 0, -torch.inf)
    return scaled.masked_fill(scaled < threshold, -torch.inf)


def _keep_top_p(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero what lies outside each row's nucleus; a top_p of 1 keeps all."""
    vocab_size = probabilities.shape[-1]
    candidates = probabilities.topk(min(NUCLEUS_CANDIDATES, vocab_size), dim=-1).values
    is_inside = candidates.sum(dim=-1, keepdim=True) >= top_p
    if not bool((is_inside | (top_p >= 1)).all()):
        candidates = probabilities.sort(dim=-1, descending=True).values
    before = candidates.cumsum(dim=-1) - candidates
    # The first candidate always stays: nothing comes before it.
    num_kept = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    threshold = candidates.gather(-1, num_kept - 1)
    return probabilities.masked_fill((probabilities < threshold) & (top_p < 1), 0.0)
