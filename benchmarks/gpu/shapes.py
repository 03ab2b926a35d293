"""Models of well-known shapes with random weights, made where they run: nothing is downloaded.

How fast a step is depends on shapes and types, not on what the weights say.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from deployments.engine.attention import ATTENTION_NAME
from deployments.engine.model_loader import LoadedModel, prepare_model


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's shape.

    Attributes:
        name: As people call the model.
        dtype: Type of its weights.
        options: What its configuration says.
    """

    name: str
    dtype: torch.dtype
    options: Mapping[str, Any]


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
        # With a wider spread than usual no two tokens are nearly equally likely.
        "initializer_range": 0.3,
    },
)


@dataclass(frozen=True, slots=True)
class BenchmarkModel(LoadedModel):
    """A model for the engine and for `generate`.

    Attributes:
        plain: What `generate` runs on: on a GPU the very same model, to hold its weights once. On a
            CPU a copy, because the engine's layers there serve a single thread.
    """

    plain: PreTrainedModel


def build(shape: Shape, device: torch.device) -> BenchmarkModel:
    """Make a model of this shape, as the loader would load it."""
    torch.manual_seed(0)
    config = Qwen2Config(**shape.options, bos_token_id=0, eos_token_id=1, pad_token_id=0)
    with device:
        model: PreTrainedModel = Qwen2ForCausalLM._from_config(  # type: ignore[no-untyped-call] # transformers leaves it untyped
            config, dtype=shape.dtype
        )
    model.train(mode=False)
    plain = copy.deepcopy(model) if device.type == "cpu" else model
    prepare_model(model)
    return BenchmarkModel(model, _tokenizer(config.vocab_size), None, frozenset({1}), plain=plain)


@contextmanager
def stock(loaded: BenchmarkModel) -> Iterator[Any]:
    """Lend the model as `generate` wants it: with transformers' own attention."""
    loaded.plain.set_attn_implementation("sdpa")
    try:
        yield loaded.plain
    finally:
        if loaded.plain is loaded.model:
            loaded.model.set_attn_implementation(ATTENTION_NAME)


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that has a piece of text for each id."""
    names = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"word{i}" for i in range(len(names), vocab_size)]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # transformers leaves it untyped
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
