"""Builds models of RoBERTa's kind with random weights; nothing is downloaded.

The speed of a forward pass depends on shapes and types, not on the values of the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from benchmarks.classification.texts import documentation
from models.training.byte_level_bpe import train_byte_level_bpe

MAX_MODEL_LEN = 512
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
VOCAB_SIZE = 4096
"""The tokenizer's vocabulary; the shape sets the rows of the embedding."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's shape.

    Attributes:
        name: The name of its folder, and its name in tables.
        options: The values of its configuration.
    """

    name: str
    options: Mapping[str, Any]


ROBERTA_BASE = Shape(
    "roberta-base-random",
    {
        "vocab_size": 50_265,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
)
"""Source: config.json of FacebookAI/roberta-base."""

SMALL = Shape(
    "roberta-small-random",
    {
        "vocab_size": 8192,
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
    },
)
"""About a tenth of the arithmetic, for the online matrix: two cores take as long per piece as the
GPU of the queue batcher's author took with a 7B model."""

TINY = Shape(
    "roberta-tiny-random",
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    },
)
"""For tests and trial runs."""


def build(shape: Shape, parent: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Save a model of this shape and its tokenizer; return their folder.

    Args:
        shape: The shape.
        parent: The folder in which to make it.
        dtype: The type of the weights.
    """
    labels = {0: "human", 1: "generated"}
    config = _config(shape, id2label=labels, label2id={name: i for i, name in labels.items()})
    torch.manual_seed(0)
    return _save(RobertaForSequenceClassification(config), shape, parent, dtype)


def _config(shape: Shape, **more: Any) -> RobertaConfig:
    return RobertaConfig(
        **shape.options,
        max_position_embeddings=MAX_MODEL_LEN + 2,  # RoBERTa's positions start at 2
        type_vocab_size=1,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        **more,
    )


def _save(model: PreTrainedModel, shape: Shape, parent: Path, dtype: torch.dtype) -> Path:
    folder = parent / shape.name
    torch.nn.Module.to(model, dtype)  # transformers' own `to` hides its types
    model.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with RoBERTa's special tokens, trained on the documentation."""
    tokenizer = train_byte_level_bpe(
        [documentation()], vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=None, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # transformers leaves it untyped
        tokenizer_object=tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=MAX_MODEL_LEN,
        model_input_names=["input_ids", "attention_mask"],
    )
