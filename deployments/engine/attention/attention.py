"""Attention over the KV cache, as transformers' models call it.

It is registered with transformers under the name `kv_cache`. One call serves one layer of one
packed step.

All rows store their keys and values and then attend over their extents. On a CPU our kernel does
that (`KVCache.attends_in_place`): a token's keys and values are the same to the last bit whether it
was decoded or prefilled. On a GPU torch's flash attention does (`KVCache.reads_by_length`). Without
either, decode rows attend over their gathered extents, and each chunk in a separate call, over the
earlier tokens and over itself, by masks; a chunk is then stored afterwards.

Arguments that it does not support (masks, ...) are refused by name, not ignored.
"""

from typing import Any

import torch
from transformers import AttentionInterface

from deployments.compute.attention_arguments import UnsupportedAttentionError, check_arguments
from deployments.compute.sdpa import Scores, attend
from deployments.compute.speedups import attend_rows
from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.attention.step_reads import ChunkRows

ATTENTION_NAME = "kv_cache"
"""The name to pass to `set_attn_implementation`."""


def kv_attention(
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
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Store the rows' keys and values and attend, for one layer.

    Args:
        module: The layer's attention module, which knows its `layer_idx`.
        query: [1, num_heads, n, head_dim].
        key: [1, num_kv_heads, n, head_dim].
        value: [1, num_kv_heads, n, head_dim].
        attention_mask: None; the packed step knows what each row sees.
        packed_step: The extents and position of each row.
        scaling: Factor on the scores; None means head_dim ** -0.5.
        sliding_window: Most tokens that a query sees, itself included.
        softcap: Bound on the scores, applied by tanh; None means no bound.
        s_aux: [num_heads], the attention sinks; None means none.
        **others: Must have no effect (see `check_arguments`).

    Returns:
        [1, n, num_heads, head_dim], and None in place of the scores.

    Raises:
        UnsupportedAttentionError: An argument asks for something unsupported, the layer looks ahead
            or attends twice, or the KV cache was made for other heads or another window.
    """
    check_arguments(module, attention_mask, others)
    if packed_step is None:
        raise UnsupportedAttentionError(
            "the model's layers do not pass their arguments on to attention"
        )
    check_heads(packed_step.kv.shape, key, value)
    layer = module.layer_idx
    assert isinstance(layer, int)
    kv = packed_step.kv
    check_window(sliding_window, kv.capacities[layer], kv.max_model_len, layer)
    if layer in packed_step.visited_layers:
        # The second keys and values would overwrite the first.
        raise UnsupportedAttentionError(f"layer {layer} attends twice in one pass")
    packed_step.visited_layers.add(layer)
    scores = Scores(scaling, softcap, s_aux).ready()
    return store_and_attend(layer, query, key, value, packed_step, scores), None


def check_heads(shape: KVShape, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse keys and values whose heads do not fit the KV cache.

    Args:
        shape: The shape of the KV cache, from the model's configuration.
        key: [1, num_kv_heads, n, head_dim].
        value: [1, num_kv_heads, n, head_dim].

    Raises:
        UnsupportedAttentionError: The heads differ; the message names both shapes.
    """
    for name, tensor in (("keys", key), ("values", value)):
        heads, head_dim = tensor.shape[1], tensor.shape[3]
        if (heads, head_dim) != (shape.num_kv_heads, shape.head_dim):
            raise UnsupportedAttentionError(
                f"the model's {name} have {heads} heads of {head_dim} elements, but its "
                f"configuration says {shape.num_kv_heads} of {shape.head_dim}"
            )


def check_window(asked: int | None, capacity: int, max_model_len: int, layer: int) -> None:
    """Refuse a layer that sees more or less than the KV cache was made for.

    Args:
        asked: The sliding window that the model passes to attention; None means no window.
        capacity: Tokens of a sequence that the layer keeps, from the model's configuration.
        max_model_len: Longest sequence; a window of this size has no effect.
        layer: Index of the layer.

    Raises:
        UnsupportedAttentionError: The windows differ; the message names both.
    """
    seen = min(asked or max_model_len, max_model_len)
    if seen != capacity:
        raise UnsupportedAttentionError(
            f"layer {layer} attends to {seen} tokens, but by the configuration its sliding window "
            f"is {capacity}"
        )


def store_and_attend(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: PackedStep,
    scores: Scores,
) -> torch.Tensor:
    """Store and attend, for a layer that has passed the checks of `kv_attention`.

    Args:
        layer: Index of the layer.
        query: [1, num_heads, n, head_dim].
        key: [1, num_kv_heads, n, head_dim].
        value: [1, num_kv_heads, n, head_dim].
        step: The extents and position of each row.
        scores: How scores are computed.

    Returns:
        [1, n, num_heads, head_dim].
    """
    if step.begin_layer is not None:
        step.begin_layer(layer)
    kv = step.kv
    if kv.reads_by_length and scores.is_plain:
        return _attend_by_length(query, key, value, layer, step, scores.scale)
    if not step.chunks:
        return _decode(query, key, value, layer, step, scores)
    if kv.attends_in_place:
        return _attend_all_rows(query, key, value, layer, step, scores)
    rows, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if num_decode := step.num_decode:
        own_query, own_key, own_value = (t[:, :, :num_decode] for t in (query, key, value))
        output[:num_decode] = _decode(own_query, own_key, own_value, layer, step, scores)[0]
    for chunk in step.chunks:
        part = chunk.rows
        output[part] = _prefill(rows[part], keys[part], values[part], layer, step, chunk, scores)
    return output[None]


def _attend_by_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    step: PackedStep,
    scale: float | None,
) -> torch.Tensor:
    """Store all rows, then attend with one call for the decode rows and one for the chunks.

    Args:
        query: [1, num_heads, n, head_dim].
        key: [1, num_kv_heads, n, head_dim].
        value: [1, num_kv_heads, n, head_dim].
        layer: Index of the layer.
        step: The packed step.
        scale: Factor on the scores; None means head_dim ** -0.5.

    Returns:
        [1, n, num_heads, head_dim].
    """
    kv, num_decode = step.kv, step.num_decode
    reads = step.reads(kv.capacities[layer])
    rows, *new = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    stored = kv.keys[layer], kv.values[layer]
    joined: list[torch.Tensor] = []
    if reads.joined is not None:  # before the chunks overwrite what they see
        pairs = zip(stored, new, strict=True)
        joined = [reads.joined.join(tokens, own[num_decode:]) for tokens, own in pairs]
    kv.write_tokens(layer, reads.places, *new)
    outputs = []
    if reads.decode is not None:
        own_rows = rows[:num_decode] if reads.chunks else rows
        outputs.append(reads.decode.attend(own_rows, *stored, scale))
    if reads.chunks is not None:
        own_rows = rows[num_decode:] if reads.decode else rows
        keys, values = joined or stored
        outputs.append(reads.chunks.attend(own_rows, keys, values, scale))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def _attend_all_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    step: PackedStep,
    scores: Scores,
) -> torch.Tensor:
    """Store and attend with all rows as if each were a decode row, in place.

    So a token's result does not depend on whether it was decoded or prefilled, nor on how its
    prompt was cut into chunks.

    Args:
        query: [1, num_heads, n, head_dim].
        key: [1, num_kv_heads, n, head_dim].
        value: [1, num_kv_heads, n, head_dim].
        layer: Index of the layer.
        step: The packed step.
        scores: How scores are computed.

    Returns:
        [1, n, num_heads, head_dim].
    """
    kv = step.kv
    keys, values = (tensor[0].transpose(0, 1) for tensor in (key, value))
    outputs = []
    for run in step.row_runs(kv.capacities[layer]):
        for chunk in run.chunks:
            part = chunk.rows
            kv.write_chunk(layer, chunk.starts, chunk.start, keys[part], values[part])
        output = attend_rows(
            query[:, :, run.rows],
            key[:, :, run.rows],
            value[:, :, run.rows],
            kv.keys[layer],
            kv.values[layer],
            run.seen,
            scores,
            in_order=run.in_order,
        )
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    step: PackedStep,
    scores: Scores,
) -> torch.Tensor:
    """Store each row's token and attend with one query per row.

    Heads that share keys take the place of query positions, so no key is repeated. Keys were stored
    with their rotary positions applied, so their order in a ring does not matter.

    Args:
        query: [1, num_heads, num_decode, head_dim].
        key: [1, num_kv_heads, num_decode, head_dim].
        value: [1, num_kv_heads, num_decode, head_dim].
        layer: Index of the layer.
        step: The extents and position of each row.
        scores: How scores are computed.

    Returns:
        [1, num_decode, num_heads, head_dim].
    """
    kv = step.kv
    tokens = kv.keys[layer], kv.values[layer]
    places = step.decode_places(kv.capacities[layer])
    if places.rows is not None and kv.attends_in_place:
        return attend_rows(query, key, value, *tokens, places.rows, scores)
    rows, *stored = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    step.store_decode(layer, *stored)
    grouped = rows.reshape(len(rows), kv.shape.num_kv_heads, -1, kv.shape.head_dim)
    own_scores = scores.grouped(1, *grouped.shape[1:3])
    outputs = [
        attend(
            grouped[span.rows],
            *map(span.read, tokens),
            attn_mask=span.mask,
            is_causal=False,
            scores=own_scores,
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
        chunk: The extents and positions of the rows.
        scores: How scores are computed.

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

    seen_keys, seen_values = kv.joined(layer, chunk.starts, chunk.start, key, value)
    mask = step.chunk_mask(chunk, kv.capacities[layer])
    output = attend(
        grouped,
        head_first(seen_keys),
        head_first(seen_values),
        attn_mask=mask,
        is_causal=mask is None,
        scores=scores.grouped(*grouped.shape[:2], 1),
    )
    kv.write_chunk(layer, chunk.starts, chunk.start, key, value)
    return output.permute(2, 0, 1, 3).flatten(1, 2)


def register_attention() -> None:
    """Register `kv_cache` with transformers.

    No mask function is registered under that name, so transformers builds no masks for it.
    """
    AttentionInterface.register(ATTENTION_NAME, kv_attention)
