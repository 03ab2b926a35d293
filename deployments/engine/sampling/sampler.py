"""From logits to the next token of each sequence.

The order of operations, in which each step sees what the one before has left:

1. logprobs, if they are asked for, are read from the logits as the model gave them.
2. Tokens that the grammar does not allow are barred: their logits become -inf. So are tokens that
   would end the sequence before `min_tokens`, unless the grammar allows no other.
3. `logit_bias` is added.
4. `repetition_penalty`, then `frequency_penalty` and `presence_penalty`.
5. At a temperature of 0 the largest logit wins.
6. Otherwise the logits are divided by `temperature`; then `min_p`, `top_k` and `top_p` keep the
   likeliest.
7. One is drawn, by a random number that depends on the row's own (seed, position) alone and by the
   inverse of the cumulative distribution in the vocabulary's order.

Of equal logits the one with the lower id always counts as the larger.

So a sequence's tokens depend neither on its neighbours nor on having been resumed elsewhere.

Source: the order is that of vLLM, https://docs.vllm.ai/en/v0.22.1/api/vllm/v1/sample/sampler/.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deployments.engine.host_copy import take_rows, to_device
from deployments.engine.inversion import invert
from deployments.engine.largest import find_maxima
from deployments.engine.logit_adjustment import adjust
from deployments.engine.logprobs import PositionLogprobs, RawLogprobs
from deployments.engine.random_numbers import uniform
from deployments.engine.sampling_row import SamplingRow
from deployments.engine.truncation import find_candidates


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that was chosen, and what else was likely, if that was asked for."""

    token_id: int
    logprobs: PositionLogprobs | None = None


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled | None]:
    """Choose the next token of each row.

    Args:
        logits: [n, vocab], float32, on the model's device. They stay as they are: a batch that
            fails is sampled again in parts.
        rows: How to sample each of the n rows.

    Returns:
        What was chosen for each row, or None where nothing can be: a logit is NaN or +inf, or
        all of them are -inf.
    """
    raw = RawLogprobs(logits, [row.params.top_logprobs for row in rows])
    is_adjusted = any(row.is_adjusted for row in rows)
    if is_adjusted:
        logits = adjust(logits, rows)
    maxima, likeliest = find_maxima(logits)
    # Stacked, because on a GPU each look at a tensor waits for all that was launched before it.
    is_sound, token_ids = torch.stack((maxima.isfinite().long(), likeliest)).tolist()
    random = [at for at, row in enumerate(rows) if row.params.temperature > 0 and is_sound[at]]
    if random:
        if len(random) < len(rows):
            logits, maxima = take_rows(logits, random), take_rows(maxima, random)
        elif not is_adjusted:
            logits = logits.clone()  # drawing changes them
        drawn = _draw(logits, maxima, [rows[at] for at in random])
        for at, token_id in zip(random, drawn, strict=True):
            token_ids[at] = token_id
    logprobs = raw.tell(token_ids)
    return [
        Sampled(token_ids[at], logprobs.get(at)) if sound else None
        for at, sound in enumerate(is_sound)
    ]


def _draw(logits: torch.Tensor, maxima: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw a token for each of the n rows; the maxima are [n] and finite."""
    token_ids = [0] * len(rows)
    for group in find_candidates(logits, maxima, [row.params for row in rows]):
        chosen = [rows[at] for at in group.rows]
        numbers = to_device(
            [uniform(row.params.seed, row.position) for row in chosen],
            logits.device,
            torch.float64,
        )
        drawn = invert(group.weights, numbers)
        if group.token_ids is not None:
            drawn = group.token_ids.gather(-1, drawn[:, None])[:, 0]
        for at, token_id in zip(group.rows, drawn.tolist(), strict=True):
            token_ids[at] = token_id
    return token_ids
