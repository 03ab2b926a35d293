"""From logits to the next token of each sequence.

The order of operations, in which each step sees what the one before has left:

1. logprobs, if they are asked for, are read from the logits as the model gave them.
2. Tokens that would end the sequence before `min_tokens` are barred: their logits become -inf.
3. `logit_bias` is added.
4. `repetition_penalty`, then `frequency_penalty` and `presence_penalty`.
5. At a temperature of 0 the largest logit wins, of equals the one with the lowest id.
6. Otherwise the logits are divided by `temperature`; then `min_p`, `top_k` and `top_p` keep the
   likeliest.
7. One is drawn: a random number that depends on the row's own (seed, position) alone, and the
   inverse of the cumulative distribution in the vocabulary's order.

So a sequence's tokens depend neither on its neighbours nor on having been resumed elsewhere.

Source: the order is that of vLLM's sampler, https://docs.vllm.ai/en/latest/api/vllm/v1/sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deployments.engine.logit_adjustment import adjust
from deployments.engine.logprobs import PositionLogprobs, RawLogprobs
from deployments.engine.random_numbers import uniform
from deployments.engine.sampling_row import SamplingRow
from deployments.engine.truncation import weigh

MAXIMUM_BLOCK = 256
"""Logits whose maximum is taken before it is known where in them it stands."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that was chosen, and what else was likely, if that was asked for."""

    token_id: int
    logprobs: PositionLogprobs | None = None


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled | None]:
    """Choose the next token of each row.

    Args:
        logits: [n, vocab], float32, on the model's device. They are changed in place.
        rows: How to sample each of the n rows.

    Returns:
        What was chosen for each row, or None where nothing can be: a logit is NaN or +inf, or
        all of them are -inf.
    """
    raw = RawLogprobs(logits, [row.params.top_logprobs for row in rows])
    if any(row.is_adjusted for row in rows):
        adjust(logits, rows)
    maxima, likeliest = find_maxima(logits)
    is_sound = maxima.isfinite().tolist()
    token_ids: list[int] = likeliest.tolist()
    random = [at for at, row in enumerate(rows) if row.params.temperature > 0 and is_sound[at]]
    if random:
        if len(random) < len(rows):
            logits, maxima = logits[random], maxima[random]
        drawn = _draw(logits, maxima, [rows[at] for at in random])
        for at, token_id in zip(random, drawn, strict=True):
            token_ids[at] = token_id
    logprobs = raw.tell(token_ids)
    return [
        Sampled(token_ids[at], logprobs.get(at)) if sound else None
        for at, sound in enumerate(is_sound)
    ]


def find_maxima(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest value and the first place where it stands; NaN is the largest.

    On a CPU torch finds a maximum about nine times as fast as its place. So the maxima of blocks
    come first, and the place is looked for in one block of each row.

    Args:
        logits: [n, vocab].

    Returns:
        Two tensors [n]: values of the same type, and places, int64.
    """
    vocab_size = logits.shape[-1]
    if logits.device.type != "cpu" or vocab_size < 2 * MAXIMUM_BLOCK:
        maxima = logits.max(dim=-1)
        return maxima.values, maxima.indices
    end = vocab_size // MAXIMUM_BLOCK * MAXIMUM_BLOCK
    block_maxima = logits[:, :end].reshape(len(logits), -1, MAXIMUM_BLOCK).amax(dim=-1)
    if end < vocab_size:
        rest = logits[:, end:].amax(dim=-1, keepdim=True)
        block_maxima = torch.cat([block_maxima, rest], dim=-1)
    best = block_maxima.argmax(dim=-1, keepdim=True)
    places = best * MAXIMUM_BLOCK + torch.arange(MAXIMUM_BLOCK)
    # Behind the end the last entry stands again and again; the first time is what is found.
    block = logits.gather(-1, places.clamp_(max=vocab_size - 1))
    place = best * MAXIMUM_BLOCK + block.argmax(dim=-1, keepdim=True)
    return block_maxima.gather(-1, best)[:, 0], place[:, 0]


def _draw(logits: torch.Tensor, maxima: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw a token for each of the n rows; the maxima are [n] and finite."""
    cumulative = weigh(logits, maxima, rows).cumsum(dim=-1, dtype=torch.float64)
    numbers = torch.tensor(
        [uniform(row.params.seed, row.position) for row in rows],
        dtype=torch.float64,
        device=logits.device,
    )[:, None]
    # `right` finds the first entry above the number, so one of weight 0 is never chosen.
    chosen = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    token_ids: list[int] = chosen[:, 0].tolist()
    return token_ids
