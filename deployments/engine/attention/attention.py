"""Attention over KV slots, as transformers' models call it.

Registered with transformers under the name `slots`. One call serves one layer of one packed step.
The decode rows store their keys and values and then attend over their slots, batched.
On a CPU the rows of prefill chunks do as well, where that is faster. Elsewhere, and where in a
layer with a sliding window a chunk's end may take the place of what its beginning sees, each chunk
attends in a call of its own, over what its slot holds and over itself, and is stored after that.

It refuses what it does not know (sinks, masks, ...) by name instead of ignoring it.
"""

from typing import Any

import torch
from transformers import AttentionInterface

from deployments.engine.attention_call import (
    UnsupportedAttentionError,
    check_arguments,
    check_heads,
    check_window,
)
from deployments.engine.cpu.row_attention import attend_rows, can_attend, can_prefill
from deployments.engine.packed_step import ChunkRows, PackedStep
from deployments.engine.softcap import Scores, attend

ATTENTION_NAME = "slots"
"""What `set_attn_implementation` is given."""


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
            ahead or attends twice, or heads or a window that the slots were not made for.
    """
    check_arguments(module, attention_mask, others)
    if packed_step is None:
        raise UnsupportedAttentionError("the model's layers pass no arguments on to attention")
    check_heads(packed_step.kv.shape, key, value)
    layer = module.layer_idx
    assert isinstance(layer, int)
    kv = packed_step.kv
    check_window(sliding_window, kv.capacities[layer], kv.max_model_len, layer)
    if layer in packed_step.visited_layers:
        # Its second keys and values would take the place of the first.
        raise UnsupportedAttentionError(f"layer {layer} attends twice in one pass")
    packed_step.visited_layers.add(layer)
    return attend_slots(layer, query, key, value, packed_step, Scores(scaling, softcap)), None


def attend_slots(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: PackedStep,
    scores: Scores,
) -> torch.Tensor:
    """Store and attend, for a layer that `slot_attention` would not refuse.

    Args:
        layer: Index of the layer.
        query: [1, num_heads, n, head_dim].
        key: [1, num_kv_heads, n, head_dim].
        value: [1, num_kv_heads, n, head_dim].
        step: Where the rows belong.
        scores: How scores are made.

    Returns:
        [1, n, num_heads, head_dim].
    """
    kv = step.kv
    if not step.chunks:
        return _decode(query, key, value, layer, step, scores)
    rows, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    is_ours = can_prefill(query, kv.shape.num_kv_heads)
    seen = step.slot_rows(kv.capacities[layer]) if is_ours else None
    if seen is not None:
        for chunk in step.chunks:
            part = chunk.rows
            kv.write_chunk(layer, chunk.slot, chunk.start, keys[part], values[part])
        return attend_rows(query, key, value, kv.keys[layer], kv.values[layer], seen, scores)
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if num_decode := step.num_decode:
        own_query, own_key, own_value = (t[:, :, :num_decode] for t in (query, key, value))
        output[:num_decode] = _decode(own_query, own_key, own_value, layer, step, scores)[0]
    for chunk in step.chunks:
        part = chunk.rows
        output[part] = _prefill(rows[part], keys[part], values[part], layer, step, chunk, scores)
    return output[None]


def _decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    step: PackedStep,
    scores: Scores,
) -> torch.Tensor:
    """Store each row's token and attend with one query per slot.

    The heads that share keys stand in the place of query positions, so nothing is repeated. Keys
    were stored with their rotary positions, so their order in a ring changes nothing.

    Args:
        query: [1, num_heads, num_decode, head_dim].
        key: [1, num_kv_heads, num_decode, head_dim].
        value: [1, num_kv_heads, num_decode, head_dim].
        layer: Index of the layer.
        step: Where the rows belong.
        scores: How scores are made.

    Returns:
        [1, num_decode, num_heads, head_dim].
    """
    kv = step.kv
    places = step.decode_places(kv.capacities[layer])
    if places.rows is not None and can_attend(query, kv.shape.num_kv_heads):
        slots = kv.keys[layer], kv.values[layer]
        return attend_rows(query, key, value, *slots, places.rows, scores)
    rows, *stored = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    step.store_decode(layer, *stored)
    reads = step.decode_reads(kv.capacities[layer])
    if reads is not None and scores.softcap is None:
        return reads.attend(rows, *kv.tokens(layer), scores.scale).contiguous()[None]
    grouped = rows.reshape(len(rows), kv.shape.num_kv_heads, -1, kv.shape.head_dim)
    outputs = [
        attend(
            grouped[span.rows],
            kv.keys[layer][span.slots, : span.read_length].transpose(1, 2),
            kv.values[layer][span.slots, : span.read_length].transpose(1, 2),
            attn_mask=span.mask,
            is_causal=False,
            scores=scores,
        )
        for span in step.decode_spans(kv.capacities[layer])
    ]
    return (
        (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1, 2).contiguous()[None]
    )


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    step: PackedStep,
    chunk: ChunkRows,
    scores: Scores,
) -> torch.Tensor:
    """Attend with a chunk's queries to its sequence's tokens so far, then store the chunk.

    Args:
        query: [m, num_heads, head_dim].
        key: [m, num_kv_heads, head_dim].
        value: [m, num_kv_heads, head_dim].
        layer: Index of the layer.
        step: The packed step.
        chunk: Where the rows belong.
        scores: How scores are made.

    Returns:
        [m, num_heads, head_dim].
    """
    kv = step.kv
    grouped = query.reshape(len(query), kv.shape.num_kv_heads, -1, kv.shape.head_dim).permute(
        1, 2, 0, 3
    )
    num_groups = grouped.shape[1]

    def head_first(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, 1)[:, None].expand(-1, num_groups, -1, -1)

    seen_keys, seen_values = kv.joined(layer, chunk.slot, chunk.start, key, value)
    mask = step.chunk_mask(chunk, kv.capacities[layer])
    output = attend(
        grouped,
        head_first(seen_keys),
        head_first(seen_values),
        attn_mask=mask,
        is_causal=mask is None,
        scores=scores,
    )
    kv.write_chunk(layer, chunk.slot, chunk.start, key, value)
    return output.permute(2, 0, 1, 3).flatten(1, 2)


def register_attention() -> None:
    """Make `slots` known to transformers.

    No mask function is registered under the name, so transformers builds no masks for it.
    """
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
