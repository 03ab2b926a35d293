"""What a model may ask of its attention, checked at each call.

Whatever is not known is refused by name: ignored, it would change the model's answers in silence.
"""

from collections.abc import Mapping
from typing import Any

import torch

from deployments.engine.kv_slots import KVShape

INERT_ARGUMENTS = frozenset(
    {
        "dropout",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)
"""Arguments that models pass to attention and that change nothing in a causal forward pass."""

FEATURES = {
    "block_indices": "sparse attention",
    "indices": "sparse attention",
    "position_bias": "biases on positions",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
}
"""What some arguments stand for."""


class UnsupportedAttentionError(ValueError):
    """The model asks its attention for something that the engine does not do."""


def check_arguments(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, others: Mapping[str, Any]
) -> None:
    """Refuse a call that asks for more than causal attention over the slots.

    Args:
        module: The layer's attention module.
        attention_mask: A mask that the model has made.
        others: Arguments beyond those that `slot_attention` knows.

    Raises:
        UnsupportedAttentionError: Names what was asked for.
    """
    # The argument outweighs the module, as it does in transformers' own attention.
    is_causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedAttentionError("the engine's attention does not look ahead")
    asked = {name for name, value in others.items() if value is not None}
    unknown = sorted(asked - INERT_ARGUMENTS - {"is_causal"})
    names = [f"{FEATURES[name]} ({name})" if name in FEATURES else name for name in unknown]
    if attention_mask is not None:
        names.append("a mask of the model's own")
    if names:
        raise UnsupportedAttentionError(
            f"the engine's attention does not support: {', '.join(names)}"
        )


def check_heads(shape: KVShape, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse keys and values that are not of the heads that the slots were made for.

    Args:
        shape: What the slots hold, by the model's configuration.
        key: [1, num_kv_heads, n, head_dim].
        value: [1, num_kv_heads, n, head_dim].

    Raises:
        UnsupportedAttentionError: Says what came and what was expected.
    """
    for name, tensor in (("keys", key), ("values", value)):
        heads, head_dim = tensor.shape[1], tensor.shape[3]
        if (heads, head_dim) != (shape.num_kv_heads, shape.head_dim):
            raise UnsupportedAttentionError(
                f"the model's {name} have {heads} heads of {head_dim} elements, but its "
                f"configuration says {shape.num_kv_heads} of {shape.head_dim}"
            )


def check_window(asked: int | None, capacity: int, max_model_len: int, layer: int) -> None:
    """Refuse a layer that sees more or less than its slots were made for.

    Args:
        asked: The sliding window that the model passes to attention; None means all.
        capacity: Tokens that a slot holds in the layer, by the model's configuration.
        max_model_len: Tokens of a sequence; a window of as many is none.
        layer: Index of the layer.

    Raises:
        UnsupportedAttentionError: Says what came and what was expected.
    """
    seen = min(asked or max_model_len, max_model_len)
    if seen != capacity:
        raise UnsupportedAttentionError(
            f"layer {layer} attends to {seen} tokens, but by the configuration its sliding window "
            f"is {capacity}"
        )
