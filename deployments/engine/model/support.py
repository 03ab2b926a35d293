"""What the engine refuses to serve, by name and as early as it can be told.

The configuration tells most of it, before any weight is read; the model's class and a look at its
positions tell some more. What only a pass over the slots shows is found when the engine warms up.
"""

import inspect
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

MULTI_AXIS = frozenset({"mrope_section", "xdrope_section"})
"""Marks of rotary positions that have more than one axis."""

PROBE_TOKEN_IDS = (3, 4)
"""Any text, but without padding, which some models leave out when they count."""

POSITION_TOLERANCE = 0.01
"""Relative error of logits: the families that the engine serves have none at all."""


class UnsupportedModelError(ValueError):
    """The model can't be served; the message names the feature or file that stands in the way."""


def has_images(config: PreTrainedConfig) -> bool:
    """Return whether the model takes images beside text."""
    return getattr(config, "vision_config", None) is not None


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what the configuration tells that the engine can't run.

    Raises:
        UnsupportedModelError: Names the features.
    """
    text = config.get_text_config()
    if text.is_heterogeneous:
        # Such a configuration can't even be asked for its heads.
        _refuse(config, ["heads that differ from layer to layer (per_layer_config)"])
    obstacles = {
        "an encoder beside the decoder": config.is_encoder_decoder,
        "no attention heads": not hasattr(text, "num_attention_heads"),
        **_obstacles_in_attention(text),
        # Prompts with images go through stock attention, and torch's kernels know no softcap.
        "images beside softcapped attention (attn_logit_softcapping)": has_images(config)
        and _asks(text, "attn_logit_softcapping"),
        "multi-axis rotary positions (mrope_section)": any(
            MULTI_AXIS & rope.keys() for rope in _rope_parameters(text)
        ),
    }
    _refuse(config, [name for name, stands in obstacles.items() if stands])


def _obstacles_in_attention(text: PreTrainedConfig) -> dict[str, bool]:
    layer_types = frozenset(getattr(text, "layer_types", None) or ())
    unknown = sorted(layer_types - SUPPORTED_LAYER_TYPES)
    return {
        f"layers of type {', '.join(unknown)}": bool(unknown),
        "attention in chunks (attention_chunk_size)": not layer_types
        and _asks(text, "attention_chunk_size"),
        "bidirectional attention": _asks(text, "use_bidirectional_attention"),
        "latent attention (kv_lora_rank)": _asks(text, "kv_lora_rank"),
        "layers that share keys and values (num_kv_shared_layers)": _asks(
            text, "num_kv_shared_layers"
        ),
        "cross-attention": _asks(text, "add_cross_attention")
        or _asks(text, "cross_attention_layers"),
        "biases on positions (alibi)": _asks(text, "alibi")
        or _asks(getattr(text, "attn_config", None), "alibi"),
    }


def _asks(config: object, name: str) -> bool:
    return bool(getattr(config, name, None))


def check_class(model: PreTrainedModel) -> None:
    """Refuse a model whose class can't be told where its tokens belong.

    Raises:
        UnsupportedModelError: Names the feature.
    """
    parameters = inspect.signature(type(model).forward).parameters
    obstacles = [
        f"a forward pass that takes no {name}"
        for name in ("position_ids", "logits_to_keep")
        if name not in parameters
    ]
    if any(hasattr(part, "rope_deltas") for part in model.modules()):
        obstacles.append("multi-axis rotary positions (rope_deltas)")
    _refuse(model.config, obstacles)


@torch.inference_mode()
def check_positions(model: PreTrainedModel) -> None:
    """Refuse a model whose own positions are not 0, 1, 2, ..., as those of a packed step are.

    Args:
        model: In evaluation mode, with stock attention.

    Raises:
        UnsupportedModelError: They are others, or the model does not run on text alone.
    """
    token_ids = torch.tensor([PROBE_TOKEN_IDS], device=model.device)
    positions = torch.arange(token_ids.shape[1], device=model.device)[None]
    try:
        own, ours = (
            model(input_ids=token_ids, use_cache=False, logits_to_keep=1, **options).logits.float()
            for options in ({}, {"position_ids": positions})
        )
    except (ValueError, TypeError, RuntimeError) as error:
        summary = str(error).strip().partition("\n")[0]
        raise UnsupportedModelError(f"the model does not run on text alone: {summary}") from error
    # Logits that are NaN pass: they have another cause, which the warm-up names.
    if (own - ours).norm() > POSITION_TOLERANCE * own.norm():
        _refuse(model.config, ["positions that don't count from zero"])


def _refuse(config: PreTrainedConfig, features: list[str]) -> None:
    if features:
        raise UnsupportedModelError(
            f"the engine can't serve {config.model_type} models with {'; '.join(features)}"
        )


def check_length(config: PreTrainedConfig, max_model_len: int) -> None:
    """Refuse more positions than the model has, or than it turns in one way.

    With longrope, how far a token is turned depends on the longest sequence of the batch as soon as
    one is longer than the model was first trained for: neighbours would change one another's text.

    Raises:
        UnsupportedModelError: Says how to mend it.
    """
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and max_model_len > longest:
        raise UnsupportedModelError(
            f"max_model_len is {max_model_len}, but the model has {longest} positions; "
            "lower max_model_len"
        )
    for rope in _rope_parameters(text):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and original and max_model_len > original:
            raise UnsupportedModelError(
                f"max_model_len is {max_model_len}, but beyond {original} positions the model's "
                "rotary positions (longrope) depend on the longest sequence of the batch; lower "
                "max_model_len"
            )


def _rope_parameters(text: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of each kind of rotary positions: one, or one for each type of layer."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    yield from nested or [rope]


def check_layers(text: PreTrainedConfig, visited_layers: Set[int]) -> None:
    """Refuse a model of which not every layer has attended over its slots.

    Raises:
        UnsupportedModelError: Names the layers.
    """
    silent = set(range(text.num_hidden_layers)) - visited_layers
    if silent:
        raise UnsupportedModelError(
            f"layers {sorted(silent)} keep their state elsewhere than in keys and values, or have "
            "an attention of their own"
        )
