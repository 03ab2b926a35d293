"""Loads a model that the engine can run, from a folder or a hub repository.

Loads safetensors only and runs no remote code. A model whose configuration shows that the engine
can't serve it is refused before any weight is read (`deployments.engine.model.support`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from deployments.compute.merged_linear import merge_plainly
from deployments.compute.model_files import (
    choose_dtype,
    load_weights,
    read_config,
    read_generation,
    wrap_load_errors,
)
from deployments.compute.speedups import check_quantization, num_weight_bytes, pack_weights
from deployments.compute.tokenizer_files import check_tokenizer, load_tokenizer
from deployments.engine.attention.attention import ATTENTION_NAME, register_attention
from deployments.engine.model.image_processor import QwenImageProcessor
from deployments.engine.model.support import (
    check_class,
    check_config,
    check_positions,
    has_images,
    is_multi_axis,
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its tokenizer and its processor.

    Attributes:
        model: In evaluation mode, on its device, attending over slots.
        tokenizer: With the chat template, if the model has one.
        processor: Prepares images and text; None for a model without images.
        eos_token_ids: Tokens that end a text, from the model's generation configuration.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    processor: ProcessorMixin | None
    eos_token_ids: frozenset[int]

    @property
    def text_config(self) -> PreTrainedConfig:
        """The configuration of the language model."""
        config: PreTrainedConfig = self.model.config.get_text_config()
        return config

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all weights in memory; tied weights count as often as they are there."""
        return num_weight_bytes(self.model)


def load_model(
    source: str,
    *,
    revision: str | None,
    dtype: str,
    device: torch.device,
    quantization: str | None = None,
) -> LoadedModel:
    """Load a model for the engine.

    Args:
        source: A folder, or the id of a hub repository.
        revision: A commit of the hub repository.
        dtype: auto, float32, bfloat16 or float16.
        device: Where the model will run.
        quantization: "int8" or "int4" (linear layers on a CPU), or None.

    Raises:
        UnsupportedModelError: Files are missing, or the model needs a feature that the
            engine lacks.
    """
    check_quantization(quantization, device)
    config = load_config(source, revision=revision)
    with wrap_load_errors(source, "its tokenizer"):
        tokenizer, processor = _load_text_side(source, config, revision)
    auto = AutoModelForImageTextToText if has_images(config) else AutoModelForCausalLM
    with wrap_load_errors(source, "its weights", config):
        chosen = choose_dtype(config, dtype, device)
        model = load_weights(auto, source, config, chosen, revision, device)
    prepare_model(model, quantization)
    return LoadedModel(model, tokenizer, processor, _eos_token_ids(model, tokenizer))


def load_config(source: str, *, revision: str | None) -> PreTrainedConfig:
    """Load a model's configuration.

    Raises:
        UnsupportedModelError: It is missing, or shows that the engine can't run the model.
    """
    config = read_config(source, revision=revision)
    with wrap_load_errors(source, "its config.json"):
        check_config(config)
    return config


def load_text_side(
    source: str, *, revision: str | None
) -> tuple[PreTrainedTokenizerBase, ProcessorMixin | None, GenerationConfig]:
    """Load all of a model but its weights: tokenizer, processor and generation configuration.

    Raises:
        UnsupportedModelError: See `load_model`.
    """
    config = load_config(source, revision=revision)
    with wrap_load_errors(source, "its tokenizer"):
        tokenizer, processor = _load_text_side(source, config, revision)
        generation = read_generation(source, revision=revision)
        if generation is None:  # transformers then takes the model's own
            generation = GenerationConfig.from_model_config(config)
    return tokenizer, processor, generation


def prepare_model(model: PreTrainedModel, quantization: str | None = None) -> None:
    """Set a model to evaluation mode, and its language model to attention over slots.

    Layers that read the same rows become one. On a CPU, also quantize the weights if asked to, and
    pack them for the CPU's kernels.

    Raises:
        UnsupportedModelError: The model does not take positions as the engine gives them, or can't
            be quantized.
    """
    check_quantization(quantization, model.device)
    check_class(model)
    model.train(mode=False).requires_grad_(requires_grad=False)
    check_positions(model)
    register_attention()
    is_composite = model.config.get_text_config() is not model.config
    model.set_attn_implementation(
        {"text_config": ATTENTION_NAME} if is_composite else ATTENTION_NAME
    )
    if model.device.type == "cpu":
        pack_weights(model, quantization)
    else:
        merge_plainly(model)


def _load_text_side(
    source: str, config: PreTrainedConfig, revision: str | None
) -> tuple[PreTrainedTokenizerBase, ProcessorMixin | None]:
    if has_images(config):
        auto: Any = QwenImageProcessor if is_multi_axis(config) else AutoProcessor
        processor = auto.from_pretrained(source, revision=revision, trust_remote_code=False)
        check_tokenizer(source, revision, processor.tokenizer)
        return processor.tokenizer, processor
    return load_tokenizer(source, revision=revision), None


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    named = model.generation_config.eos_token_id if model.generation_config else None
    if named is None:
        named = tokenizer.eos_token_id
    if named is None:
        return frozenset()
    return frozenset(named if isinstance(named, list) else [named])
