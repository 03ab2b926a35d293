"""Chooses the next token of each sequence from its logits.

The order of operations; each works on the result of the one before:

1. Logprobs, if requested, are read from the logits as the model gave them.
2. Tokens that the grammar does not allow are barred: their logits become -inf. So are tokens that
   would end the sequence before `min_tokens`, unless the grammar allows no other.
3. `logit_bias` is added.
4. `repetition_penalty` is applied, then `frequency_penalty` and `presence_penalty`.
5. At temperature 0 the largest logit wins.
6. Otherwise the logits are divided by `temperature`; then `min_p`, `top_k` and `top_p` keep the
   likeliest tokens.
7. One of these is drawn: a random number that depends only on the row's own (seed, position) goes
   through the inverse of the cumulative distribution, in the vocabulary's order.

Of equal logits, the one with the lower id always counts as the larger.

So a sequence's tokens depend neither on its neighbours nor on whether it was resumed elsewhere.

Source: the order is that of vLLM, https://docs.vllm.ai/en/v0.22.1/api/vllm/v1/sample/sampler/.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from deployments.compute.host_to_device import take_rows, to_device
from deployments.contract.sampling_params import SamplingParams, uniform
from deployments.engine.sampling.device_counts import DeviceCounts
from deployments.engine.sampling.inverse_cdf import inverse_cdf
from deployments.engine.sampling.logit_processors import adjust
from deployments.engine.sampling.logprobs import PositionLogprobs, RawLogprobs
from deployments.engine.sampling.row import SamplingRow
from deployments.engine.sampling.stable_top_k import argmax
from deployments.engine.sampling.truncation import (
    Candidates,
    KeepNuclei,
    find_candidates,
    guess_nuclei,
    read_nuclei,
    whole_nuclei,
)

MIN_TEMPERATURE = 1e-5
"""Smaller temperatures are raised to this. float32 could not tell them from 0, and they are as good
as greedy."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token, and its log-probabilities if requested."""

    token_id: int
    logprobs: PositionLogprobs | None = None


@torch.inference_mode()
def sample(
    logits: torch.Tensor, rows: Sequence[SamplingRow], counts: DeviceCounts | None = None
) -> list[Sampled | None]:
    """Choose the next token of each row.

    Args:
        logits: [n, vocab], float32, on the model's device. They are not changed: a batch that fails
            is sampled again in parts.
        rows: How to sample each of the n rows.
        counts: Keeps the counts of tokens on the logits' device; None sends them in each step.

    Returns:
        The choice for each row; None for a row from which nothing can be chosen, because a logit is
        NaN or +inf, or all are -inf.
    """
    raw = RawLogprobs(logits, [row.params.top_logprobs for row in rows])
    is_adjusted = any(row.is_adjusted for row in rows)
    if is_adjusted:
        logits = adjust(logits, rows, counts)
    maxima, likeliest = argmax(logits)
    is_finite: Sequence[int]
    logprobs: Mapping[int, PositionLogprobs]
    if waits_for_reads(logits.device):
        is_finite, token_ids, logprobs = _choose_in_one_read(logits, maxima, likeliest, rows, raw)
    else:
        is_finite, token_ids = _choose(logits, maxima, likeliest, rows, may_change=is_adjusted)
        logprobs = raw.of_tokens(token_ids)
    return [
        Sampled(token_ids[at], logprobs.get(at)) if finite else None
        for at, finite in enumerate(is_finite)
    ]


def waits_for_reads(device: torch.device) -> bool:
    """Return whether each read of a tensor waits for all work launched before it."""
    return device.type != "cpu"


def _choose(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    likeliest: torch.Tensor,
    rows: Sequence[SamplingRow],
    *,
    may_change: bool,
) -> tuple[list[int], list[int]]:
    """Return whether each row is finite, and its token; see `sample`.

    Args:
        logits: [n, vocab], float32.
        maxima: [n], the largest of each row.
        likeliest: [n], int64, its place.
        rows: How to sample each of the n rows.
        may_change: Whether the logits may be changed in place.
    """
    is_finite, token_ids = torch.stack((maxima.isfinite().long(), likeliest)).tolist()
    random = [at for at, row in enumerate(rows) if row.params.temperature > 0 and is_finite[at]]
    if random:
        if len(random) < len(rows):
            logits, maxima = take_rows(logits, random), take_rows(maxima, random)
        elif not may_change:
            logits = logits.clone()  # drawing changes logits in place
        for group, drawn in _draw(logits, maxima, [rows[at] for at in random], read_nuclei):
            for place, token_id in zip(group.rows, drawn.tolist(), strict=True):
                token_ids[random[place]] = token_id
    return is_finite, token_ids


def _choose_in_one_read(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    likeliest: torch.Tensor,
    rows: Sequence[SamplingRow],
    raw: RawLogprobs,
) -> tuple[list[bool], list[int], Mapping[int, PositionLogprobs]]:
    """As `_choose`, with one read, which also takes the log-probabilities by row.

    Rows that are not finite are drawn from zeros, for nothing. If nuclei are wider than their short
    lists, these rows are drawn again and everything is read once more.
    """
    is_finite = maxima.isfinite()
    is_complete = torch.ones_like(is_finite)
    chosen = _Chosen(logits, maxima, is_finite, rows, likeliest, is_complete)
    random = [at for at, row in enumerate(rows) if row.params.temperature > 0]
    if random:
        chosen.draw(random, guess_nuclei)
    finite, token_ids, complete, logprobs = _read(chosen, raw)
    wide = [at for at in random if finite[at] and not complete[at]]
    if wide:
        chosen.draw(wide, whole_nuclei)
        finite, token_ids, _, logprobs = _read(chosen, raw)
    return finite, token_ids, logprobs


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The choice for n rows, on the logits' device.

    Attributes:
        logits: [n, vocab], float32; not changed.
        maxima: [n], the largest of each row.
        is_finite: [n], bool.
        rows: How to sample each.
        token_ids: [n], int64.
        is_complete: [n], bool: whether a token was drawn from all that may be.
    """

    logits: torch.Tensor
    maxima: torch.Tensor
    is_finite: torch.Tensor
    rows: Sequence[SamplingRow]
    token_ids: torch.Tensor
    is_complete: torch.Tensor

    def draw(self, at: list[int], keep_nuclei: KeepNuclei) -> None:
        """Draw the tokens of some of the rows, all at temperatures above 0."""
        device = self.logits.device
        drawn_from = take_rows(self.logits, at)
        is_lost = ~take_rows(self.is_finite, at)
        drawn_from.masked_fill_(is_lost[:, None], 0.0)
        largest = take_rows(self.maxima, at).masked_fill_(is_lost, 0.0)
        for group, drawn in _draw(drawn_from, largest, [self.rows[i] for i in at], keep_nuclei):
            places = to_device([at[place] for place in group.rows], device, torch.int64)
            self.token_ids.index_copy_(0, places, drawn)
            if group.is_complete is not None:
                self.is_complete.index_copy_(0, places, group.is_complete)


def _read(
    chosen: _Chosen, raw: RawLogprobs
) -> tuple[list[bool], list[int], list[bool], Mapping[int, PositionLogprobs]]:
    """Read on the host, at once: which rows are finite, tokens, which are complete, logprobs.

    float64 holds each of these numbers exactly.
    """
    parts = (chosen.is_finite, chosen.token_ids, chosen.is_complete)
    logprobs = raw.on_device(chosen.token_ids).flatten()
    numbers = torch.cat([*(part.double() for part in parts), logprobs]).tolist()
    n = len(chosen.rows)
    finite, token_ids, complete = (numbers[i * n : (i + 1) * n] for i in range(3))
    found = raw.read(numbers[3 * n :])
    return list(map(bool, finite)), list(map(int, token_ids)), list(map(bool, complete)), found


def scale(
    logits: torch.Tensor, maxima: torch.Tensor, params: Sequence[SamplingParams]
) -> torch.Tensor:
    """Divide each row by its temperature, in place, and return it: at most 0, [n, vocab].

    Args:
        logits: [n, vocab], float32.
        maxima: [n], the largest logit of each row, all finite. They are subtracted first.
        params: How to sample each of the n rows, all at temperatures above 0.
    """
    temperatures = [max(p.temperature, MIN_TEMPERATURE) for p in params]
    divisors = to_device(temperatures, logits.device, logits.dtype)[:, None]
    return logits.sub_(maxima[:, None]).div_(divisors)


def _draw(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    rows: Sequence[SamplingRow],
    keep_nuclei: KeepNuclei,
) -> Iterator[tuple[Candidates, torch.Tensor]]:
    """Yield tokens for each of the n rows: the candidates of some, and their tokens, int64.

    Args:
        logits: [n, vocab], float32; they are changed in place.
        maxima: [n], the largest of each row, all finite.
        rows: How to sample each of the n rows.
        keep_nuclei: See `find_candidates`.
    """
    params = [row.params for row in rows]
    for group in find_candidates(scale(logits, maxima, params), params, keep_nuclei):
        chosen = [rows[at] for at in group.rows]
        numbers = to_device(
            [uniform(row.params.seed, row.position) for row in chosen],
            logits.device,
            torch.float64,
        )
        drawn = inverse_cdf(group.weights, numbers)
        if group.token_ids is not None:
            drawn = group.token_ids.gather(-1, drawn[:, None])[:, 0]
        yield group, drawn
