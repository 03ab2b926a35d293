"""Models with random weights, as the loader would return them."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from deployments.engine.model.loader import LoadedModel, load_model, prepare_model

FOLDER = Path(__file__).resolve().parent.parent / "models/pydoc-chat"


def loaded_with_tokenizer(model: PreTrainedModel) -> LoadedModel:
    """Prepare a model on the CPU, and give it the embedded model's tokenizer and no end."""
    cpu = torch.device("cpu")
    tokenizer = load_model(str(FOLDER), revision=None, dtype="float32", device=cpu).tokenizer
    prepare_model(model)
    return LoadedModel(model, tokenizer, None, frozenset())
