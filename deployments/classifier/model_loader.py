"""Loads a classifier from a folder or a hub repository.

It loads only safetensors and never remote code. It refuses a model without a trained head, whose
answers would come from random weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from deployments.classifier.packed_attention import register_attention
from deployments.classifier.packed_backbone import first_position, is_right_padded, pack
from deployments.classifier.probe_texts import ProbeTexts
from deployments.classifier.request_queue import TokenIds
from deployments.classifier.sequence_classifier import Layout
from deployments.compute.cpu.linear.prepack import num_weight_bytes, prepack
from deployments.compute.model_files import (
    choose_dtype,
    require_all_weights,
    require_tokenizer_files,
    wrap_load_errors,
)

PROBE_LENGTHS = (2, 9, 5)
"""Lengths of the texts that are tried together, in tokens, without the special tokens around them;
a longer text is added for models with a sliding window."""


@dataclass(frozen=True, slots=True)
class LoadedClassifier:
    """A model, its tokenizer, and how to lay out its micro-batches.

    Attributes:
        model: In evaluation mode, on its device.
        tokenizer: The model's tokenizer.
        max_model_len: The most tokens of one text, special ones included.
        layout: How its micro-batches are laid out.
        probes: Makes texts that the model accepts.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_model_len: int
    layout: Layout
    probes: ProbeTexts

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels, in the order of the model's outputs."""
        return label_names(self.model.config)

    @property
    def num_weight_bytes(self) -> int:
        """The bytes of all weights in memory."""
        return num_weight_bytes(self.model)


def load_classifier(
    source: str,
    *,
    revision: str | None,
    dtype: str,
    device: torch.device,
    max_model_len: int,
) -> LoadedClassifier:
    """Load a model.

    Args:
        source: A folder, or the id of a hub repository.
        revision: A commit of the hub repository.
        dtype: auto, float32, bfloat16 or float16.
        device: Where the model will run.
        max_model_len: The most tokens of one text, unless the model has fewer positions.

    Raises:
        UnsupportedModelError: Files are missing, or the model is not a classifier.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    with wrap_load_errors(source):
        config = AutoConfig.from_pretrained(source, **options)
        chosen = choose_dtype(config, dtype, device)
        model = _load_weights(source, config, chosen, options)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        require_tokenizer_files(source, tokenizer)
    length = fit_length(max_model_len, model)
    probes = ProbeTexts.of(model, tokenizer)
    layout = prepare(model, device, length, probes)
    return LoadedClassifier(model, tokenizer, length, layout, probes)


def load_outline(source: str, *, revision: str | None) -> PreTrainedModel:
    """Return a model without weights: its layers hold no memory.

    Raises:
        UnsupportedModelError: Files are missing, or the model is not a classifier.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    with wrap_load_errors(source), torch.device("meta"):
        config = AutoConfig.from_pretrained(source, **options)
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call] # transformers leaves it untyped
    return model


def label_names(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the names of the labels, in the order of the model's outputs."""
    names = config.id2label
    assert names is not None, (
        "transformers names them LABEL_0, LABEL_1, ... if the configuration does not"
    )
    return tuple(name for _, name in sorted(names.items()))


def fit_length(max_model_len: int, model: PreTrainedModel) -> int:
    """Return the most tokens of a text: `max_model_len`, or less if the model has less."""
    return min(max_model_len, num_positions(model) or max_model_len)


def prepare(
    model: PreTrainedModel, device: torch.device, max_model_len: int, probes: ProbeTexts
) -> Layout:
    """Move a model to its device for inference; on a CPU, pack its sequences and its weights.

    Returns:
        The layout that its micro-batches need, found by trial runs.
    """
    model.train(mode=False).requires_grad_(requires_grad=False)
    torch.nn.Module.to(model, device)
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    num_framing = len(probes.before) + len(probes.after)
    lengths = [length + num_framing for length in (*PROBE_LENGTHS, 2 * window + 3)]
    texts = [probes.of_length(min(length, max_model_len)) for length in lengths]
    if device.type != "cpu":
        return _unpacked_layout(model, texts)
    register_attention()
    layout: Layout = "packed" if pack(model, texts) else _unpacked_layout(model, texts)
    prepack(model)
    return layout


def _unpacked_layout(model: PreTrainedModel, texts: Sequence[TokenIds]) -> Layout:
    return "padded" if is_right_padded(model, texts) else "one by one"


def num_positions(model: PreTrainedModel) -> int | None:
    """Return the most tokens of a sequence; None if the configuration sets no limit."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    return positions - first_position(model)


def _load_weights(
    source: str, config: PreTrainedConfig, dtype: torch.dtype, options: dict[str, Any]
) -> PreTrainedModel:
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(
        source,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    model: PreTrainedModel = loaded[0]
    advice = "; was the model trained as a classifier?"
    require_all_weights(source, loaded[1]["missing_keys"], advice)
    return model
