"""Folders with tiny random classifiers, as a replica loads them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deployments.pooling.model_loader import LoadedPooler, load_pooler
from tests.engine.tiny_models import byte_tokenizer
from tests.pooling.tiny_classifiers import roberta


def framing_tokenizer() -> PreTrainedTokenizerBase:
    """Return a byte-level tokenizer that puts special tokens before (2) and after (3) a text."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<special0> $A <special1>", special_tokens=[("<special0>", 2), ("<special1>", 3)]
    )
    return tokenizer


def save_classifier(folder: Path, model: PreTrainedModel | None = None) -> Path:
    """Save a classifier with its tokenizer."""
    (model or roberta()).save_pretrained(folder)
    framing_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path, **changes: Any) -> LoadedPooler:
    """Load a folder on the CPU, as a classifier's unless the changes name another task."""
    options: dict[str, Any] = {
        "revision": None,
        "dtype": "auto",
        "device": torch.device("cpu"),
        "max_model_len": 4096,
        **changes,
    }
    return load_pooler(str(folder), **options)
