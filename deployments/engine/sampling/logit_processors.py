"""Changes the logits before a token is chosen, greedily or not: barred tokens, biases, penalties.

Only the entries that change are touched, in all rows at once. So the cost depends on the number of
biases and of distinct tokens in the rows that use them, not on the vocabulary. Only a grammar
touches all logits of its rows.
"""

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import torch

from deployments.compute.host_to_device import send, to_device
from deployments.engine.grammar.matcher import unpack
from deployments.engine.sampling.device_counts import DeviceCounts, penalized_logits
from deployments.engine.sampling.row import SamplingRow

if TYPE_CHECKING:
    from array import array


def adjust(
    logits: torch.Tensor, rows: Sequence[SamplingRow], counts: DeviceCounts | None = None
) -> torch.Tensor:
    """Return a copy of the logits, adjusted as the rows ask; `sampler` documents the order.

    Args:
        logits: [n, vocab], float32, on the model's device.
        rows: How to adjust each of the n rows.
        counts: Keeps the counts of tokens on the logits' device; None sends all of them.
    """
    adjusted = logits.clone()
    _constrain(adjusted, rows)
    _bias(adjusted, rows)
    if counts is None:
        _penalize(adjusted, rows)
    else:
        counts.penalize(adjusted, rows)
    return adjusted


def _constrain(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Bar the tokens that the rows' grammars do not allow."""
    constrained = [(at, row.bitmask) for at, row in enumerate(rows) if row.bitmask is not None]
    if not constrained:
        return
    places, bitmasks = zip(*constrained, strict=True)
    device = logits.device
    is_barred = unpack(send(torch.stack(bitmasks), device), logits.shape[-1])
    # Added, not filled in: filling would hide a NaN or +inf.
    bars = torch.zeros(is_barred.shape, device=device).masked_fill_(is_barred, -inf)
    logits.index_add_(0, to_device(places, device, torch.int64), bars)


def _bias(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    # Adding keeps -inf at -inf, and never makes a logit finite that was not.
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

    The repetition penalty divides positive logits and multiplies the others. Then
    c * frequency_penalty is subtracted from a token's logit, where c is how often the output holds
    the token, and presence_penalty if c > 0.

    Source: Keskar et al., CTRL, 2019, section 4.1, with the signs as transformers'
    RepetitionPenaltyLogitsProcessor has them; and for the other two
    https://platform.openai.com/docs/guides/text-generation (frequency and presence penalties).
    """
    penalized = [
        (at, row.params, row.token_counts) for at, row in enumerate(rows) if row.token_counts
    ]
    if not penalized:
        return
    lengths = torch.tensor([len(seen) for _, _, seen in penalized])
    counts = _joined([seen.output_counts for _, _, seen in penalized])
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
        send(_joined([seen.token_ids for _, _, seen in penalized]), device),
    )
    held = logits[entries]
    logits[entries] = penalized_logits(held, factors, taken)


def _joined(parts: Sequence["array[int]"]) -> torch.Tensor:
    """Return the arrays joined into one tensor: int64, on the host."""
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.int64)
