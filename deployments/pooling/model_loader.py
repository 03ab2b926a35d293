"""Loads a classifier or an embedding model from a folder or a hub repository.

It loads only safetensors and never remote code. It refuses a classifier without a trained head,
whose answers would come from random weights.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from deployments.compute.model_files import choose_dtype, load_weights, wrap_load_errors
from deployments.compute.speedups import num_weight_bytes, pack_weights
from deployments.contract.descriptions import Task
from deployments.plan.model_shape import ModelShape
from deployments.pooling.embedder import Embedder, load_layers
from deployments.pooling.model_outline import (
    fit_length,
    label_names,
    load_config,
    load_text_tokenizer,
    note_activation,
    put_into_lower_case,
    reads_types,
)
from deployments.pooling.packed_attention import register_attention
from deployments.pooling.packed_backbone import TextModel, is_right_padded, pack
from deployments.pooling.pooling_model import Layout
from deployments.pooling.probe_texts import ProbeTexts
from deployments.pooling.request_queue import TokenIds
from deployments.pooling.sentence_files import read_sentence_files
from deployments.pooling.traced_backbone import trace

logger = logging.getLogger(__name__)

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
    tokenizer = load_text_tokenizer(source, config, revision=revision)
    with wrap_load_errors(source, "its weights", config):
        model = load(source, config, choose_dtype(config, dtype, device), revision, device)
    put_into_lower_case(source, tokenizer, model)
    with_types = reads_types(model)
    length = fit_length(max_model_len, model)
    probes = ProbeTexts.of(model, tokenizer)
    layout = prepare(model, device, length, probes)
    return LoadedPooler(model, tokenizer, length, layout, probes, with_types)


def prepare(
    model: TextModel, device: torch.device, max_model_len: int, probes: ProbeTexts
) -> Layout:
    """Move a model to its device for inference and pack its sequences; on a CPU, its weights, too.

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
    on_cpu = device.type == "cpu"
    if not on_cpu and not takes_flash_attention(model):
        logger.warning("texts are padded: flash attention takes no %s in %s", *_heads_of(model))
        return _unpacked_layout(model, texts)
    register_attention()
    with_types = reads_types(model)
    layout: Layout = "packed" if pack(model, texts) else _unpacked_layout(model, texts)
    if not on_cpu:
        return layout
    pack_weights(model)
    if layout == "packed":
        trace(model, texts[: len(PROBE_LENGTHS)], reads_types=with_types)
    return layout


def takes_flash_attention(model: TextModel) -> bool:
    """Return whether a GPU's flash attention takes a model's heads; `pack` compares its results."""
    dtype = str(model.dtype).removeprefix("torch.")
    return ModelShape.of(model.config, is_pooler=True).reads_by_length(dtype)


def _heads_of(model: TextModel) -> tuple[str, str]:
    """Return a model's heads and their type, for the log."""
    shape = ModelShape.of(model.config, is_pooler=True)
    kind = f"heads of {shape.head_dim} elements" + (" with a softcap" if shape.has_softcap else "")
    return kind, str(model.dtype).removeprefix("torch.")


def _unpacked_layout(model: TextModel, texts: Sequence[TokenIds]) -> Layout:
    return "padded" if is_right_padded(model, texts) else "one by one"


def _load_classifier(
    source: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    revision: str | None,
    device: torch.device,
) -> PreTrainedModel:
    label_names(config)  # refuses those that can't be read
    note_activation(source, revision, config)  # an embedding model says so here
    return load_weights(
        AutoModelForSequenceClassification,
        source,
        config,
        dtype,
        revision,
        device,
        advice="; was the model trained as a classifier?",
    )


def _load_embedder(
    source: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    revision: str | None,
    device: torch.device,
) -> Embedder:
    files = read_sentence_files(source, revision=revision)
    # No vector is made from the backbone's own pooler, so its weights may be missing.
    backbone = load_weights(AutoModel, source, config, dtype, revision, device, optional="pooler.")
    if hasattr(backbone, "pooler"):
        setattr(backbone, "pooler", None)  # noqa: B010 - mypy takes it for a module
    return Embedder(backbone, files, load_layers(source, revision, files, dtype))
