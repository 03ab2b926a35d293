"""Builds models of well-known shapes with random weights on the device; nothing is downloaded.

The speed of a step depends on shapes and dtypes, not on the values of the weights.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from deployments.engine.attention.attention import ATTENTION_NAME
from deployments.engine.model.loader import LoadedModel, prepare_model


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's shape.

    Attributes:
        name: The model's usual name.
        dtype: Dtype of its weights.
        options: The options of its configuration.
        config: The class of its configuration.
        model: Its class.
    """

    name: str
    dtype: torch.dtype
    options: Mapping[str, Any]
    config: Callable[..., PreTrainedConfig] = Qwen2Config
    model: type[PreTrainedModel] = Qwen2ForCausalLM


SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}

QWEN_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}

QWEN_05B = Shape(
    "Qwen2-0.5B",
    torch.bfloat16,
    {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "rope_parameters": QWEN_ROPE,
        "tie_word_embeddings": True,
    },
)

QWEN_7B = Shape(
    "Qwen2.5-7B",
    torch.bfloat16,
    {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_parameters": QWEN_ROPE,
        "tie_word_embeddings": False,
    },
)
"""Source: config.json of Qwen/Qwen2-0.5B and Qwen/Qwen2.5-7B-Instruct."""

TINY = Shape(
    "tiny",
    torch.float32,
    {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        # A wider spread than usual, so that no two tokens are nearly equally likely.
        "initializer_range": 0.3,
    },
)

TINY_LLAMA = replace(TINY, name="tiny Llama", config=LlamaConfig, model=LlamaForCausalLM)

TINY_GEMMA3 = replace(
    TINY,
    name="tiny Gemma 3 with a window of 32",
    options={
        **TINY.options,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    config=Gemma3TextConfig,
    model=Gemma3ForCausalLM,
)

TINY_GPT_OSS = replace(
    TINY,
    name="tiny gpt-oss with sinks, experts and a window of 32",
    options={
        **TINY.options,
        "head_dim": 16,
        "sliding_window": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    config=GptOssConfig,
    model=GptOssForCausalLM,
)

TINY_QWEN_VL = replace(
    TINY,
    name="tiny Qwen2.5-VL",
    options={
        "text_config": {
            **TINY.options,
            **SPECIAL_TOKENS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 2, 2],
            },
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": TINY.options["hidden_size"],
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.3,
        },
        # The first ids are in no text here.
        "image_token_id": 0,
        "video_token_id": 1,
    },
    config=Qwen2_5_VLConfig,
    model=Qwen2_5_VLForConditionalGeneration,
)

GEMMA3_12B = Shape(
    "Gemma 3 12B's text model",
    torch.bfloat16,
    {
        "vocab_size": 262_208,
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "max_position_embeddings": 131_072,
    },
    Gemma3TextConfig,
    Gemma3ForCausalLM,
)
"""Source: config.json of google/gemma-3-12b-it."""


@dataclass(frozen=True, slots=True)
class BenchmarkModel(LoadedModel):
    """A model for the engine and for `generate`.

    Attributes:
        plain: The model for `generate`. On a GPU it is the same object, to hold the weights once.
            On a CPU it is a copy, because the engine's layers there serve a single thread.
        stock_attention: The attention that transformers chooses for its text.
    """

    plain: PreTrainedModel
    stock_attention: str


def build(shape: Shape, device: torch.device) -> BenchmarkModel:
    """Build a model of this shape, and prepare it as the loader does."""
    torch.manual_seed(0)
    config = shape.config(**shape.options, **SPECIAL_TOKENS)
    with device:
        model: PreTrainedModel = shape.model._from_config(  # type: ignore[no-untyped-call] # transformers leaves it untyped
            config, dtype=shape.dtype
        )
    model.train(mode=False)
    plain = copy.deepcopy(model) if device.type == "cpu" else model
    chosen = str(config.get_text_config()._attn_implementation)
    prepare_model(model)
    tokenizer = _tokenizer(config.get_text_config().vocab_size)
    return BenchmarkModel(
        model, tokenizer, None, frozenset({1}), plain=plain, stock_attention=chosen
    )


@contextmanager
def stock(loaded: BenchmarkModel) -> Iterator[Any]:
    """Yield the model with transformers' own attention; then restore the engine's attention."""
    _set_attention(loaded.plain, loaded.stock_attention)
    try:
        yield loaded.plain
    finally:
        if loaded.plain is loaded.model:
            _set_attention(loaded.model, ATTENTION_NAME)


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of the model's text; a vision tower keeps its own."""
    is_composite = model.config.get_text_config() is not model.config
    model.set_attn_implementation({"text_config": name} if is_composite else name)


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that has a text for each id."""
    names = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"word{i}" for i in range(len(names), vocab_size)]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # transformers leaves it untyped
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
