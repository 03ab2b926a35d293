"""Attention over sequences that are packed one after another in one row, for transformers' models.

It is registered with transformers under the name `packed`. Each sequence attends only to itself, so
no padding is computed and no mask is needed. On a GPU one call of flash attention takes all
sequences of a row; elsewhere there is a call for each.

It raises an error for arguments that it does not support (sinks, position biases, ...) instead of
ignoring them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from deployments.compute.attention_arguments import INERT_ARGUMENTS, UnsupportedAttentionError
from deployments.compute.sdpa import Scores, attend, flash_attention

ATTENTION_NAME = "packed"
"""The name for `set_attn_implementation`."""

INERT = INERT_ARGUMENTS | {"deterministic"}
"""Arguments without effect here; ModernBERT passes `deterministic` for gradients."""

MAX_PLAIN_LENGTH = 1024
"""The longest sequence whose scores are all held at once; with 12 heads they take 24 MiB."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asks of its attention.

    Attributes:
        is_causal: Whether tokens see only earlier ones and themselves.
        window: Tokens at this distance or farther don't see each other; None means no window.
        scores: The factor and the bound of the scores.
    """

    is_causal: bool
    window: int | None
    scores: Scores


class AttendedRow(Protocol):
    """What a packed model attends over."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Attend, for one layer.

        Args:
            query: [1, num_heads, n, head_dim].
            key: [1, num_kv_heads, n, head_dim].
            value: [1, num_kv_heads, n, head_dim].
            call: What the layer asks.

        Returns:
            [1, n, num_heads, head_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The layout of a row of packed sequences.

    Attributes:
        lengths: Tokens of each sequence, in order.
        starts: [len(lengths) + 1], int32, on a GPU: the first token of each sequence, and the
            number of tokens; None if each sequence has a call of its own.
    """

    lengths: tuple[int, ...]
    starts: torch.Tensor | None = None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Attend within each sequence; see `AttendedRow`."""
        if self.starts is not None:
            return self._attend_at_once(query, key, value, call, self.starts)
        _, num_heads, num_rows, _ = query.shape
        output = query.new_empty(1, num_rows, num_heads, value.shape[-1])
        for span in self.spans():
            rows, keys, values = (tensor[0, :, span] for tensor in (query, key, value))
            output[0, span] = _attend(rows, keys, values, call).transpose(0, 1)
        return output

    def _attend_at_once(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
        starts: torch.Tensor,
    ) -> torch.Tensor:
        if call.scores.softcap is not None:
            raise UnsupportedAttentionError("flash attention does not support: softcap")
        reach = None if call.window is None else call.window - 1
        longest = max(self.lengths)
        output = flash_attention(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            starts,
            starts,
            longest,
            longest,
            is_causal=call.is_causal,
            scale=call.scores.scale,
            window_size_left=reach,
            window_size_right=None if call.is_causal else reach,
        )
        return output[None]

    def spans(self) -> Iterator[slice]:
        """Yield the slice of each sequence."""
        for start, end in pairwise((0, *accumulate(self.lengths))):
            yield slice(start, end)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_row: AttendedRow | None = None,
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
        attention_mask: None; the packed row determines what each token sees.
        packed_row: The layout of the sequences.
        scaling: Factor on the scores; None means head_dim ** -0.5.
        sliding_window: Tokens at this distance or farther don't see each other.
        softcap: Bound on the scores, applied with tanh; None means no bound.
        is_causal: Whether tokens see only earlier ones and themselves; None means the module's
            setting.
        **others: Further arguments, which must be inert or None.

    Returns:
        [1, n, num_heads, head_dim], and None instead of the scores.

    Raises:
        UnsupportedAttentionError: An argument is neither None nor inert.
    """
    asked = {name for name, argument in others.items() if argument is not None}
    unknown = sorted(asked - INERT)
    if unknown or attention_mask is not None or packed_row is None:
        what = ", ".join(unknown) or "a mask, or no packed row"
        raise UnsupportedAttentionError(f"packed attention does not support: {what}")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    call = AttentionCall(is_causal, sliding_window, Scores(scaling, softcap))
    return packed_row.attend(query, key, value, call), None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> torch.Tensor:
    """Attend within one sequence.

    Args:
        query: [num_heads, n, head_dim].
        key: [num_kv_heads, n, head_dim].
        value: [num_kv_heads, n, head_dim].
        call: What the layer asks.

    Returns:
        [num_heads, n, head_dim].
    """
    length, is_causal, scores = query.shape[1], call.is_causal, call.scores
    mask = None
    if call.window is not None and call.window < length:
        mask = _window_mask(length, call.window, is_causal, query.device)
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
    """Return which tokens each token sees, [length, length], bool.

    Source: transformers, modeling_flash_attention_utils.py: a window is `sliding_window - 1`
    tokens to either side.
    """
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    return (distance < window) & (distance >= 0 if is_causal else distance > -window)


def _is_plain(query: torch.Tensor, key: torch.Tensor, scores: Scores) -> bool:
    """Return whether two matrix products are faster than torch's fused kernel.

    On a CPU with bfloat16 products they take at most half of its time, at 40 to 400 tokens of 12
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
    """Attend with all scores held at once and the softmax in float32."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.bmm(query, key.mT).float().mul_(scale).softmax(-1)
    return torch.bmm(weights.to(query.dtype), value)


def register_attention() -> None:
    """Register `packed` with transformers.

    No mask function is registered under this name, so transformers builds no masks for it.
    """
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
