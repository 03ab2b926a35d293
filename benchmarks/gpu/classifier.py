"""Measures how fast texts are classified on a GPU."""

import time
from typing import Any

import torch
from transformers import RobertaConfig, RobertaForSequenceClassification

from deployments.pooling.model_loader import prepare
from deployments.pooling.pooling_model import PoolingModel
from deployments.pooling.probe_texts import ProbeTexts

ROBERTA_LARGE: dict[str, Any] = {
    "vocab_size": 50_265,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 514,
    "num_labels": 2,
}
"""Source: config.json of FacebookAI/roberta-large."""

TINY_ROBERTA: dict[str, Any] = {
    **ROBERTA_LARGE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
}

FIRST_TOKEN = 10
"""The special tokens are below."""

NUM_BATCHES = 8


def texts_per_second(
    device: torch.device, num_tokens: int, length: int, *, is_tiny: bool
) -> tuple[float, str]:
    """Return the texts that a classifier answers in a second, and how its batches are laid out.

    Args:
        device: Where it runs.
        num_tokens: Tokens of a batch.
        length: Tokens of each text.
        is_tiny: Whether the model has a tiny shape.
    """
    config = RobertaConfig(**(TINY_ROBERTA if is_tiny else ROBERTA_LARGE))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with device:
        model = RobertaForSequenceClassification._from_config(config, dtype=dtype)  # type: ignore[no-untyped-call] # transformers leaves it untyped
    ordinary = tuple(range(FIRST_TOKEN, config.vocab_size))
    probes = ProbeTexts((0,), (2,), ordinary)
    layout = prepare(model, device, 512, probes)
    pooling = PoolingModel(model, layout, probes.of_length(8))
    texts = [
        tuple(FIRST_TOKEN + (31 * i + 7 * j) % len(ordinary) for j in range(length))
        for i in range(num_tokens // length)
    ]
    pooling(texts)
    started = time.perf_counter()
    for _ in range(NUM_BATCHES):
        pooling(texts)
    return NUM_BATCHES * len(texts) / (time.perf_counter() - started), layout
