"""Refuses models that the engine can't serve, and names the reason, as early as possible.

Most reasons show in the configuration, before any weight is read. Others show in the model's class
or in a short test of its positions. The rest shows when the engine warms up: it needs a pass over
the slots.
"""

import inspect
from collections.abc import Set

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from deployments.compute.device_errors import is_out_of_memory
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.plan.model_shape import longrope_range, rope_parameters

SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

MULTI_AXIS = frozenset({"mrope_section", "xdrope_section"})
"""Keys of the configuration that mark rotary positions with more than one axis."""

SERVED_MULTI_AXIS = frozenset({"qwen2_5_vl"})
"""Types of models with several axes that are served: only the tokens of images differ by axis."""

PROBE_TOKEN_IDS = (3, 4)
"""Any tokens but padding, which some models skip when they count positions."""

POSITION_TOLERANCE = 0.01
"""Relative error of logits. The families that the engine serves have none at all."""


def has_images(config: PreTrainedConfig) -> bool:
    """Return whether the model takes images as well as text."""
    return getattr(config, "vision_config", None) is not None


def is_multi_axis(config: PreTrainedConfig) -> bool:
    """Return whether the model's `get_rope_index` lays out the positions of a prompt with images.

    Each text has the same position on all axes. But an image takes fewer positions than tokens, so
    the positions of all tokens after it are shifted.
    """
    return config.model_type in SERVED_MULTI_AXIS


def check_config(config: PreTrainedConfig) -> None:
    """Refuse a configuration that the engine can't run.

    Raises:
        UnsupportedModelError: The model needs other features; the message names them.
    """
    text = config.get_text_config()
    if text.is_heterogeneous:
        # Reading the number of heads from such a configuration raises.
        _refuse(config, ["heads that differ from layer to layer (per_layer_config)"])
    obstacles = {
        "an encoder beside the decoder": config.is_encoder_decoder,
        "no attention heads": not hasattr(text, "num_attention_heads"),
        **_obstacles_in_attention(text),
        # Prompts with images go through stock attention, and torch's kernels have no softcap.
        "images beside softcapped attention (attn_logit_softcapping)": has_images(config)
        and _has(text, "attn_logit_softcapping"),
        "multi-axis rotary positions (mrope_section)": not is_multi_axis(config)
        and any(MULTI_AXIS & rope.keys() for rope in rope_parameters(text)),
    }
    _refuse(config, [name for name, is_present in obstacles.items() if is_present])


def _obstacles_in_attention(text: PreTrainedConfig) -> dict[str, bool]:
    layer_types = frozenset(getattr(text, "layer_types", None) or ())
    unknown = sorted(layer_types - SUPPORTED_LAYER_TYPES)
    return {
        f"layers of type {', '.join(unknown)}": bool(unknown),
        "attention in chunks (attention_chunk_size)": not layer_types
        and _has(text, "attention_chunk_size"),
        "bidirectional attention": _has(text, "use_bidirectional_attention"),
        "latent attention (kv_lora_rank)": _has(text, "kv_lora_rank"),
        "layers that share keys and values (num_kv_shared_layers)": _has(
            text, "num_kv_shared_layers"
        ),
        "cross-attention": _has(text, "add_cross_attention")
        or _has(text, "cross_attention_layers"),
        "biases on positions (alibi)": _has(text, "alibi")
        or _has(getattr(text, "attn_config", None), "alibi"),
    }


def _has(config: object, name: str) -> bool:
    return bool(getattr(config, name, None))


def check_class(model: PreTrainedModel) -> None:
    """Refuse a model whose forward pass does not take the engine's positions.

    Raises:
        UnsupportedModelError: The forward pass does not take them; the message says why.
    """
    parameters = inspect.signature(type(model).forward).parameters
    obstacles = [
        f"a forward pass that takes no {name}"
        for name in ("position_ids", "logits_to_keep")
        if name not in parameters
    ]
    has_deltas = any(hasattr(part, "rope_deltas") for part in model.modules())
    if has_deltas and not is_multi_axis(model.config):
        obstacles.append("multi-axis rotary positions (rope_deltas)")
    _refuse(model.config, obstacles)


@torch.inference_mode()
def check_positions(model: PreTrainedModel) -> None:
    """Refuse a model that does not count positions 0, 1, 2, ... as a packed step does.

    Args:
        model: In evaluation mode, with stock attention.

    Raises:
        UnsupportedModelError: The model counts differently, or does not run on text only.
    """
    token_ids = torch.tensor([PROBE_TOKEN_IDS], device=model.device)
    positions = torch.arange(token_ids.shape[1], device=model.device)[None]
    try:
        own, ours = (
            model(input_ids=token_ids, use_cache=False, logits_to_keep=1, **options).logits.float()
            for options in ({}, {"position_ids": positions})
        )
    except (ValueError, TypeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        summary = str(error).strip().partition("\n")[0]
        raise UnsupportedModelError(f"the model does not run on text only: {summary}") from error
    # NaN logits pass here: the warm-up reports their cause.
    if (own - ours).norm() > POSITION_TOLERANCE * own.norm():
        _refuse(model.config, ["positions that don't count from zero"])


def _refuse(config: PreTrainedConfig, features: list[str]) -> None:
    if features:
        raise UnsupportedModelError(
            f"the engine can't serve {config.model_type} models with {'; '.join(features)}"
        )


def check_length(config: PreTrainedConfig, max_model_len: int) -> None:
    """Refuse a `max_model_len` beyond the model's positions, or beyond its original longrope range.

    Past that range, longrope rotates every token by an amount that depends on the longest sequence
    in the batch, so sequences would change one another's text.

    Raises:
        UnsupportedModelError: `max_model_len` is too large; the message names the limit.
    """
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and max_model_len > longest:
        raise UnsupportedModelError(
            f"max_model_len is {max_model_len}, but the model has {longest} positions; "
            "lower max_model_len"
        )
    original = longrope_range(text)
    if original is not None and max_model_len > original:
        raise UnsupportedModelError(
            f"max_model_len is {max_model_len}, but beyond {original} positions the model's "
            "rotary positions (longrope) depend on the longest sequence of the batch; lower "
            "max_model_len"
        )


def check_layers(text: PreTrainedConfig, visited_layers: Set[int]) -> None:
    """Refuse a model in which some layer has not attended over its slots.

    Raises:
        UnsupportedModelError: Layers have not attended; the message names them.
    """
    silent = set(range(text.num_hidden_layers)) - visited_layers
    if silent:
        raise UnsupportedModelError(
            f"layers {sorted(silent)} keep state other than keys and values, or have an attention "
            "of their own"
        )
