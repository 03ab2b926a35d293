"""Loads a classifier or an embedding model from a folder or a hub repository.

It loads only safetensors and never remote code. It refuses a classifier without a trained head,
whose answers would come from random weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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

from deployments.compute.model_files import (
    choose_dtype,
    load_weights,
    read_config,
    read_labels,
    wrap_load_errors,
)
from deployments.compute.speedups import num_weight_bytes, pack_weights
from deployments.compute.tokenizer_files import load_tokenizer, require_embeddings
from deployments.contract.descriptions import Task
from deployments.contract.model_errors import UnsupportedModelError
from deployments.pooling.embedder import Embedder, load_layers, make_layers
from deployments.pooling.packed_attention import register_attention
from deployments.pooling.packed_backbone import (
    TextModel,
    first_position,
    is_right_padded,
    pack,
)
from deployments.pooling.pooling_model import Layout
from deployments.pooling.probe_texts import ProbeTexts
from deployments.pooling.request_queue import TokenIds
from deployments.pooling.sentence_files import read_activation, read_sentence_files
from deployments.pooling.traced_backbone import trace

PROBE_LENGTHS = (2, 9, 5)
"""Lengths of the texts that are tried together, in tokens, without the special tokens around them;
a longer text is added for models with a sliding window."""


@dataclass(frozen=True, slots=True)
class LoadedPooler:
    """A model, its tokenizer, and how to lay out its micro-batches.

    Attributes:
        model: In evaluation mode, on its device.
        tokenizer: The model's tokenizer.
        max_model_len: The most tokens of one text, special ones included.
        layout: How its micro-batches are laid out.
        probes: Makes texts that the model accepts.
        reads_types: Whether the model tells a pair's texts apart by the types of tokens.
    """

    model: TextModel
    tokenizer: PreTrainedTokenizerBase
    max_model_len: int
    layout: Layout
    probes: ProbeTexts
    reads_types: bool

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels, in the order of the model's outputs; empty if it embeds."""
        return () if isinstance(self.model, Embedder) else label_names(self.model.config)

    @property
    def num_weight_bytes(self) -> int:
        """The bytes of all weights in memory."""
        return num_weight_bytes(self.model)


def load_pooler(
    source: str,
    *,
    task: Task = "classify",
    revision: str | None,
    dtype: str,
    device: torch.device,
    max_model_len: int,
) -> LoadedPooler:
    """Load a model.

    Args:
        source: A folder, or the id of a hub repository.
        task: What the model does: classify or embed.
        revision: A commit of the hub repository.
        dtype: auto, float32, bfloat16 or float16.
        device: Where the model will run.
        max_model_len: The most tokens of one text, unless the model has fewer positions.

    Raises:
        UnsupportedModelError: Files are missing, or the model does not do this.
    """
    config = load_config(source, revision=revision)
    load = _load_embedder if task == "embed" else _load_classifier
    with wrap_load_errors(source, "its tokenizer"):
        tokenizer = load_tokenizer(source, revision=revision)
        require_embeddings(tokenizer, config.get_text_config().vocab_size)
    with wrap_load_errors(source, "its weights", config):
        model = load(source, config, choose_dtype(config, dtype, device), revision)
    if isinstance(model, Embedder) and model.files.lowercases:
        _put_into_lower_case(source, tokenizer)
    reads_types = _reads_types(model)
    length = fit_length(max_model_len, model)
    probes = ProbeTexts.of(model, tokenizer)
    layout = prepare(model, device, length, probes)
    return LoadedPooler(model, tokenizer, length, layout, probes, reads_types)


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
        _note_activation(source, revision, config)
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call] # transformers leaves it untyped
    return model


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


def prepare(
    model: TextModel, device: torch.device, max_model_len: int, probes: ProbeTexts
) -> Layout:
    """Move a model to its device for inference; on a CPU, pack its sequences and its weights.

    Returns:
        The layout that its micro-batches need, found by trial runs.
    """
    model.train(mode=False).requires_grad_(requires_grad=False)
    torch.nn.Module.to(model, device)
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False  # a decoder's keys are of no use after the text
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    num_framing = len(probes.before) + len(probes.after)
    lengths = [length + num_framing for length in (*PROBE_LENGTHS, 2 * window + 3)]
    texts = [probes.of_length(min(length, max_model_len)) for length in lengths]
    if device.type != "cpu":
        return _unpacked_layout(model, texts)
    register_attention()
    reads_types = _reads_types(model)
    layout: Layout = "packed" if pack(model, texts) else _unpacked_layout(model, texts)
    pack_weights(model)
    if layout == "packed":
        trace(model, texts[: len(PROBE_LENGTHS)], reads_types=reads_types)
    return layout


def _unpacked_layout(model: TextModel, texts: Sequence[TokenIds]) -> Layout:
    return "padded" if is_right_padded(model, texts) else "one by one"


def num_positions(model: TextModel) -> int | None:
    """Return the most tokens of a sequence; None if the configuration sets no limit."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    return positions - first_position(model)


def _reads_types(model: TextModel) -> bool:
    """Return whether a model, which is not packed yet, accepts token_type_ids and tells them apart.

    A tokenizer may make them for a model that does not: DistilBERT is saved with BERT's.
    """
    for module in (model, model.base_model):
        if "token_type_ids" not in signature(module.forward).parameters:
            return False
    # XLNet compares the types of two tokens; its configuration names no number of types.
    return getattr(model.config, "type_vocab_size", 2) > 1


def _load_classifier(
    source: str, config: PreTrainedConfig, dtype: torch.dtype, revision: str | None
) -> PreTrainedModel:
    label_names(config)  # refuses those that can't be read
    _note_activation(source, revision, config)  # an embedding model says so here
    return load_weights(
        AutoModelForSequenceClassification,
        source,
        config,
        dtype,
        revision,
        advice="; was the model trained as a classifier?",
    )


def _note_activation(source: str, revision: str | None, config: PreTrainedConfig) -> None:
    """Write the activation of a cross-encoder's newer files to where the older ones have it."""
    activation = read_activation(source, revision=revision)
    if activation is not None:
        config.sentence_transformers = {"activation_fn": activation}


def _load_embedder(
    source: str, config: PreTrainedConfig, dtype: torch.dtype, revision: str | None
) -> Embedder:
    files = read_sentence_files(source, revision=revision)
    # No vector is made from the backbone's own pooler, so its weights may be missing.
    backbone = load_weights(AutoModel, source, config, dtype, revision, optional="pooler.")
    if hasattr(backbone, "pooler"):
        setattr(backbone, "pooler", None)  # noqa: B010 - mypy takes it for a module
    return Embedder(backbone, files, load_layers(source, revision, files, dtype))


def _put_into_lower_case(source: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a tokenizer read texts in lower case (do_lower_case of sentence-transformers).

    Raises:
        UnsupportedModelError: The tokenizer is no fast one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"can't load {source!r}: its files set do_lower_case, which needs a fast tokenizer; "
            f"the model's is a {type(tokenizer).__name__}"
        )
    own = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
