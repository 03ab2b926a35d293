"""Checks the arguments that a model passes to its attention, at each call.

Unknown arguments are refused by name: ignoring them would silently change the model's answers.
"""

from collections.abc import Mapping
from typing import Any

import torch

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
"""The features that some arguments belong to."""


class UnsupportedAttentionError(ValueError):
    """The model needs an attention feature that the engine lacks."""


def check_arguments(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, others: Mapping[str, Any]
) -> None:
    """Refuse a call that needs more than causal attention over a sequence.

    Args:
        module: The layer's attention module.
        attention_mask: A mask made by the model.
        others: Arguments that `kv_attention` does not know.

    Raises:
        UnsupportedAttentionError: The call needs other features; the message names them.
    """
    # The argument overrides the module's attribute, as in transformers' own attention.
    is_causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedAttentionError("the engine's attention is causal: it can't look ahead")
    asked = {name for name, value in others.items() if value is not None}
    unknown = sorted(asked - INERT_ARGUMENTS - {"is_causal"})
    names = [f"{FEATURES[name]} ({name})" if name in FEATURES else name for name in unknown]
    if attention_mask is not None:
        names.append("a mask of the model's own")
    if names:
        raise UnsupportedAttentionError(
            f"the engine's attention does not support: {', '.join(names)}"
        )
