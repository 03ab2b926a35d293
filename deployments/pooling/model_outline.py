"""What is known of a classifier or an embedding model from its files, without its weights.

The embedded engine's loader begins with it, and where another engine computes it is all that is
read. It loads no remote code.
"""

from inspect import signature

import torch
from tokenizers import normalizers
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from deployments.compute.model_files import read_config, read_labels, wrap_load_errors
from deployments.compute.tokenizer_files import load_tokenizer, require_embeddings
from deployments.contract.descriptions import Task
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.pooling.embedder import Embedder, make_layers
from deployments.pooling.packed_backbone import TextModel, first_position
from deployments.pooling.sentence_files import read_activation, read_sentence_files


def load_config(source: str, *, revision: str | None) -> PreTrainedConfig:
    """Load a model's configuration.

    Raises:
        UnsupportedModelError: It is missing or broken.
    """
    return read_config(source, revision=revision)


def load_outline(source: str, *, task: Task = "classify", revision: str | None) -> TextModel:
    """Return a model without weights: its layers hold no memory.

    Raises:
        UnsupportedModelError: Files are missing, or the model does not do this.
    """
    config = load_config(source, revision=revision)
    with wrap_load_errors(source, "its configuration", config), torch.device("meta"):
        if task == "embed":
            files = read_sentence_files(source, revision=revision)
            backbone = AutoModel.from_config(config)  # type: ignore[no-untyped-call] # as below
            return Embedder(backbone, files, make_layers(files, torch.float32))
        label_names(config)  # refuses those that can't be read
        note_activation(source, revision, config)
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call] # transformers leaves it untyped
    return model


def load_text_tokenizer(
    source: str, config: PreTrainedConfig, *, revision: str | None
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer.

    Raises:
        UnsupportedModelError: It is missing or broken, or has tokens that the model does not know.
    """
    with wrap_load_errors(source, "its tokenizer"):
        tokenizer = load_tokenizer(source, revision=revision)
        require_embeddings(tokenizer, config.get_text_config().vocab_size)
    return tokenizer


def label_names(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the names of the labels, in the order of the model's outputs.

    Raises:
        UnsupportedModelError: The configuration does not name each output.
    """
    # transformers names them LABEL_0, LABEL_1, ... if the configuration does not.
    return read_labels(config.name_or_path or "", config.id2label)


def fit_length(max_model_len: int, model: TextModel) -> int:
    """Return the most tokens of a text: `max_model_len`, or less if the model has less."""
    own = model.files.max_seq_length if isinstance(model, Embedder) else None
    return min(max_model_len, num_positions(model) or max_model_len, own or max_model_len)


def num_positions(model: TextModel) -> int | None:
    """Return the most tokens of a sequence; None if the configuration sets no limit."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    return positions - first_position(model)


def reads_types(model: TextModel) -> bool:
    """Return whether a model, which is not packed yet, accepts token_type_ids and tells them apart.

    A tokenizer may make them for a model that does not: DistilBERT is saved with BERT's.
    """
    for module in (model, model.base_model):
        if "token_type_ids" not in signature(module.forward).parameters:
            return False
    # XLNet compares the types of two tokens; its configuration names no number of types.
    return getattr(model.config, "type_vocab_size", 2) > 1


def note_activation(source: str, revision: str | None, config: PreTrainedConfig) -> None:
    """Write the activation of a cross-encoder's newer files to where the older ones have it."""
    activation = read_activation(source, revision=revision)
    if activation is not None:
        config.sentence_transformers = {"activation_fn": activation}


def put_into_lower_case(source: str, tokenizer: PreTrainedTokenizerBase, model: TextModel) -> None:
    """Make a tokenizer read texts in lower case, if the model's files ask for it (do_lower_case).

    Raises:
        UnsupportedModelError: The tokenizer is no fast one.
    """
    if not (isinstance(model, Embedder) and model.files.lowercases):
        return
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"can't load {source!r}: its files set do_lower_case, which needs a fast tokenizer; "
            f"the model's is a {type(tokenizer).__name__}"
        )
    own = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
