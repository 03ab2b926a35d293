"""What changes the logits before a token is chosen, greedily or not: bars, biases and penalties.

Only the entries that change are touched, in all rows at once, so the cost follows the number of
biases and of distinct tokens in the rows that use them, not the vocabulary. A grammar alone looks
at all of its rows' logits.
"""

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import torch

from deployments.engine.grammar import unpack
from deployments.engine.host_copy import send, to_device
from deployments.engine.sampling_row import SamplingRow

if TYPE_CHECKING:
    from array import array


def adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Return a copy to which is applied what the rows ask for; `sampler` tells the order.

    Args:
        logits: [n, vocab], float32, on the model's device.
        rows: What to do with each of the n rows.
    """
    adjusted = logits.clone()
    _constrain(adjusted, rows)
    _bias(adjusted, rows)
    _penalize(adjusted, rows)
    return adjusted


def _constrain(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Bar what the rows' grammars do not allow."""
    constrained = [(at, row.bitmask) for at, row in enumerate(rows) if row.bitmask is not None]
    if not constrained:
        return
    places, bitmasks = zip(*constrained, strict=True)
    device = logits.device
    is_barred = unpack(send(torch.stack(bitmasks), device), logits.shape[-1])
    # Added, not filled in: a logit that is not finite must not become so.
    bars = torch.zeros(is_barred.shape, device=device).masked_fill_(is_barred, -inf)
    logits.index_add_(0, to_device(places, device, torch.int64), bars)


def _bias(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    # Whatever else is added to it, -inf stays -inf, and what is not finite never becomes so.
    entries = [
        (at, token_id, bias)
        for at, row in enumerate(rows)
        for token_id, bias in (*row.params.logit_bias, *((i, -inf) for i in row.barred_token_ids))
    ]
    if not entries:
        return
    places, token_ids, biases = zip(*entries, strict=True)
    device = logits.device
    logits.index_put_(
        (to_device(places, device, torch.int64), to_device(token_ids, device, torch.int64)),
        to_device(biases, device, logits.dtype),
        accumulate=True,
    )


def _penalize(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply the penalties.

    The repetition penalty divides positive logits and multiplies the others. Then, with c as how
    often the output holds the token, c * frequency_penalty is taken from its logit, and
    presence_penalty if c > 0.

    Source: Keskar et al., CTRL, 2019, section 4.1, with the signs as transformers'
    RepetitionPenaltyLogitsProcessor has them; and for the other two
    https://platform.openai.com/docs/guides/text-generation (frequency and presence penalties).
    """
    penalized = [(at, row.params, row.history) for at, row in enumerate(rows) if row.history]
    if not penalized:
        return
    # The histories are on the host; what they come to is copied to the device once a step.
    lengths = torch.tensor([len(history) for _, _, history in penalized])
    counts = _joined([history.output_counts for _, _, history in penalized])
    values = torch.tensor(
        [
            (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            for _, params, _ in penalized
        ],
        dtype=logits.dtype,
    )
    repetition, presence, frequency = values.repeat_interleave(lengths, dim=0).unbind(-1)
    device = logits.device
    factors = send(repetition, device)
    taken = send(counts * frequency + (counts > 0) * presence, device)
    entries = (
        send(torch.tensor([at for at, _, _ in penalized]).repeat_interleave(lengths), device),
        send(_joined([history.token_ids for _, _, history in penalized]), device),
    )
    held = logits[entries]
    logits[entries] = torch.where(held > 0, held / factors, held * factors) - taken


def _joined(parts: Sequence["array[int]"]) -> torch.Tensor:
    """Return all of them as one tensor: int64, on the host."""
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.int64)
