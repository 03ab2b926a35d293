"""Attention of sequences that lie behind one another in one row, as transformers' models call it.

Registered with transformers under the name `packed`. Each sequence attends to itself alone, so no
token is computed for padding's sake and no mask keeps neighbours apart.

It refuses what it does not know (sinks, biases on positions, ...) by name instead of ignoring it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import AttentionInterface

from deployments.engine.attention_call import INERT_ARGUMENTS, UnsupportedAttentionError
from deployments.engine.softcap import Scores, attend

ATTENTION_NAME = "packed"
"""What `set_attn_implementation` is given."""

INERT = INERT_ARGUMENTS | {"deterministic"}
"""Arguments that change nothing here; ModernBERT tells flash attention how to sum its gradients."""

MAX_PLAIN_LENGTH = 1024
"""Tokens up to which all scores of a sequence exist at once; of 12 heads that is 24 MiB."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Where sequences lie in a row.

    Attributes:
        lengths: Of the sequences, in their order.
    """

    lengths: tuple[int, ...]

    def spans(self) -> Iterator[slice]:
        """Yield the place of each sequence."""
        for start, end in pairwise((0, *accumulate(self.lengths))):
            yield slice(start, end)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_row: PackedRow | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence, for one layer.

    Args:
        module: The layer's attention module.
        query: [1, num_heads, n, head_dim].
        key: [1, num_kv_heads, n, head_dim].
        value: [1, num_kv_heads, n, head_dim].
        attention_mask: None; the packed row knows what each token sees.
        packed_row: Where the sequences lie.
        scaling: Factor on the scores; None means head_dim ** -0.5.
        sliding_window: Tokens that are as far apart, or farther, don't see each other.
        softcap: Bound of the scores, by a tanh; None means no bound.
        is_causal: Whether tokens see none behind them; None means what the module says.
        **others: Must be inert.

    Returns:
        [1, n, num_heads, head_dim], and None in place of the scores.

    Raises:
        UnsupportedAttentionError: An argument that is neither None nor inert.
    """
    asked = {name for name, argument in others.items() if argument is not None}
    unknown = sorted(asked - INERT)
    if unknown or attention_mask is not None or packed_row is None:
        what = ", ".join(unknown) or "a mask, or no packed row"
        raise UnsupportedAttentionError(f"packed attention does not support: {what}")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    scores = Scores(scaling, softcap)
    _, num_heads, num_rows, _ = query.shape
    output = query.new_empty(1, num_rows, num_heads, value.shape[-1])
    for span in packed_row.spans():
        rows, keys, values = (tensor[0, :, span] for tensor in (query, key, value))
        found = _attend(rows, keys, values, is_causal, sliding_window, scores)
        output[0, span] = found.transpose(0, 1)
    return output, None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    window: int | None,
    scores: Scores,
) -> torch.Tensor:
    """Attend within one sequence.

    Args:
        query: [num_heads, n, head_dim].
        key: [num_kv_heads, n, head_dim].
        value: [num_kv_heads, n, head_dim].
        is_causal: Whether tokens see none behind them.
        window: Tokens that are as far apart, or farther, don't see each other.
        scores: How scores are made.

    Returns:
        [num_heads, n, head_dim].
    """
    length = query.shape[1]
    mask = None
    if window is not None and window < length:
        mask = _window_mask(length, window, is_causal, query.device)
    if mask is None and not is_causal and _is_plain(query, key, scores):
        return _attend_plainly(query, key, value, scores.scale)
    grouped = query.reshape(len(key), -1, length, query.shape[-1])
    shape = (-1, grouped.shape[1], -1, -1)
    output = attend(
        grouped,
        key[:, None].expand(shape),
        value[:, None].expand(shape),
        attn_mask=mask,
        is_causal=is_causal and mask is None,
        scores=scores,
    )
    return output.flatten(0, 1)


def _window_mask(length: int, window: int, is_causal: bool, device: torch.device) -> torch.Tensor:
    """Return what each token sees, [length, length], bool.

    Source: transformers, modeling_flash_attention_utils.py: a window is `sliding_window - 1`
    tokens to either side.
    """
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    return (distance < window) & (distance >= 0 if is_causal else distance > -window)


def _is_plain(query: torch.Tensor, key: torch.Tensor, scores: Scores) -> bool:
    """Return whether two matrix products are faster than torch's fused kernel.

    On a CPU that multiplies bfloat16 they take half of its time or less, at 40 to 400 tokens of 12
    heads; in float32 they gain nothing.
    """
    return (
        query.device.type == "cpu"
        and query.dtype is torch.bfloat16
        and query.shape[1] <= MAX_PLAIN_LENGTH
        and len(query) == len(key)
        and scores.softcap is None
    )


def _attend_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attend with all scores at once, the softmax in float32."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.bmm(query, key.mT).float().mul_(scale).softmax(-1)
    return torch.bmm(weights.to(query.dtype), value)


def register_attention() -> None:
    """Make `packed` known to transformers.

    No mask function is registered under the name, so transformers builds no masks for it.
    """
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
