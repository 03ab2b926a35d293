"""Attention over KV slots, as transformers' models call it.

Registered with transformers under the name `slots`. One call serves one layer of one packed step:
it stores the keys and values of all n tokens in their slots, then lets the decode rows attend in
one batched call and each prefill chunk in a call of its own.

It refuses what it does not know (sinks, masks, ...) by name instead of ignoring it.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from deployments.engine.attention_call import (
    UnsupportedAttentionError,
    check_arguments,
    check_heads,
)
from deployments.engine.kv_slots import KVSlots
from deployments.engine.softcap import attend

ATTENTION_NAME = "slots"
"""What `set_attn_implementation` is given."""

READ_BUCKET = 64
"""Decode reads are cut to the longest sequence, rounded up to this many tokens, so that kernels
and masks meet few different shapes."""


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """A prefill chunk's place among the packed rows, in its sequence and in the slots."""

    first_row: int
    slot: int
    start: int
    end: int

    @property
    def rows(self) -> slice:
        """The chunk's rows."""
        return slice(self.first_row, self.first_row + self.end - self.start)


@dataclass(slots=True)
class PackedStep:
    """Where each row of a packed step belongs. Decode rows come first.

    Attributes:
        kv: The slots of all layers.
        slots: [n], int64, the slot of each row.
        positions: [n], int64, the position of each row in its sequence.
        num_decode: Decode rows.
        decode_slots: [num_decode], int64; or None when they are exactly 0 .. num_decode-1, so that
            the read is a view.
        read_length: Tokens that the decode rows read from their slots.
        chunks: The prefill chunks.
        visited_layers: The layers that attended in this step, each with its sliding window.
    """

    kv: KVSlots
    slots: torch.Tensor
    positions: torch.Tensor
    num_decode: int
    decode_slots: torch.Tensor | None
    read_length: int
    chunks: tuple[ChunkRows, ...]
    visited_layers: dict[int, int | None] = field(default_factory=dict)
    _decode_masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def decode_mask(self, window: int | None) -> torch.Tensor:
        """Return which slot positions each decode row sees: [num_decode, 1, 1, read_length], bool.

        Made once a step for each window.
        """
        mask = self._decode_masks.get(window)
        if mask is None:
            last = self.positions[: self.num_decode, None]
            mask = _visible(last, self.read_length, window)[:, None, None]
            self._decode_masks[window] = mask
        return mask


def _visible(positions: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """Return the causal mask of queries at these positions [..., 1] over keys 0 .. num_keys-1."""
    keys = torch.arange(num_keys, device=positions.device)
    visible = keys <= positions
    return visible if window is None else visible & (keys > positions - window)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_step: PackedStep | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Store and attend, for one layer.

    Args:
        module: The layer's attention module, which knows its `layer_idx`.
        query: [1, num_heads, n, head_dim].
        key: [1, num_kv_heads, n, head_dim].
        value: [1, num_kv_heads, n, head_dim].
        attention_mask: None; the packed step knows what each row sees.
        packed_step: Where the rows belong.
        scaling: Factor on the scores; None means head_dim ** -0.5.
        sliding_window: Most tokens that a query sees, itself included.
        softcap: Bound of the scores, by a tanh; None means no bound.
        **others: Must be inert.

    Returns:
        [1, n, num_heads, head_dim], and None in place of the scores.

    Raises:
        UnsupportedAttentionError: An argument that is neither None nor inert, a layer that looks
            ahead or attends twice, or heads that don't fit the slots.
    """
    check_arguments(module, attention_mask, others)
    if packed_step is None:
        raise UnsupportedAttentionError("the model's layers pass no arguments on to attention")
    check_heads(packed_step.kv.shape, key, value)
    layer = module.layer_idx
    assert isinstance(layer, int)
    if layer in packed_step.visited_layers:
        # Its second keys and values would take the place of the first.
        raise UnsupportedAttentionError(f"layer {layer} attends twice in one pass")
    packed_step.visited_layers[layer] = sliding_window
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    packed_step.kv.write(layer, packed_step.slots, packed_step.positions, keys, values)
    rows = query[0].transpose(0, 1)
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if packed_step.num_decode:
        output[: packed_step.num_decode] = _decode(
            rows[: packed_step.num_decode], layer, packed_step, scaling, sliding_window, softcap
        )
    for chunk in packed_step.chunks:
        output[chunk.rows] = _prefill(
            rows[chunk.rows], layer, packed_step.kv, chunk, scaling, sliding_window, softcap
        )
    return output[None], None


def _decode(
    query: torch.Tensor,
    layer: int,
    step: PackedStep,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend with one query per slot.

    The heads that share keys stand in the place of query positions, so nothing is repeated.

    Args:
        query: [num_decode, num_heads, head_dim].
        layer: Index of the layer.
        step: Where the rows belong.
        scaling: Factor on the scores.
        window: Most tokens that a query sees.
        softcap: Bound of the scores.

    Returns:
        [num_decode, num_heads, head_dim].
    """
    keys = _read(step.kv.keys[layer], step)
    values = _read(step.kv.values[layer], step)
    grouped = query.reshape(step.num_decode, step.kv.shape.num_kv_heads, -1, step.kv.shape.head_dim)
    output = attend(
        grouped,
        keys,
        values,
        attn_mask=step.decode_mask(window),
        is_causal=False,
        scale=scaling,
        softcap=softcap,
    )
    return output.flatten(1, 2)


def _read(stored: torch.Tensor, step: PackedStep) -> torch.Tensor:
    """Return [num_decode, num_kv_heads, read_length, head_dim] of one layer's keys or values."""
    if step.decode_slots is None:
        rows = stored[: step.num_decode, : step.read_length]
    else:
        rows = stored[:, : step.read_length].index_select(0, step.decode_slots)
    return rows.transpose(1, 2)


def _prefill(
    query: torch.Tensor,
    layer: int,
    kv: KVSlots,
    chunk: ChunkRows,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend with a chunk's queries to all its sequence's tokens so far.

    Args:
        query: [m, num_heads, head_dim].
        layer: Index of the layer.
        kv: The slots.
        chunk: Where the rows belong.
        scaling: Factor on the scores.
        window: Most tokens that a query sees.
        softcap: Bound of the scores.

    Returns:
        [m, num_heads, head_dim].
    """
    grouped = query.reshape(len(query), kv.shape.num_kv_heads, -1, kv.shape.head_dim).permute(
        1, 2, 0, 3
    )
    num_groups = grouped.shape[1]

    def read(stored: torch.Tensor) -> torch.Tensor:
        head_first = stored[chunk.slot, : chunk.end].transpose(0, 1)
        return head_first[:, None].expand(-1, num_groups, -1, -1)

    is_plain = chunk.start == 0 and (window is None or chunk.end <= window)
    mask = None
    if not is_plain:
        positions = torch.arange(chunk.start, chunk.end, device=query.device)[:, None]
        mask = _visible(positions, chunk.end, window)
    output = attend(
        grouped,
        read(kv.keys[layer]),
        read(kv.values[layer]),
        attn_mask=mask,
        is_causal=is_plain,
        scale=scaling,
        softcap=softcap,
    )
    return output.permute(2, 0, 1, 3).flatten(1, 2)


def register_attention() -> None:
    """Make `slots` known to transformers.

    No mask function is registered under the name, so transformers builds no masks for it.
    """
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
