"""What vLLM is told of a classifier or an embedding model, and what is done with its numbers here.

The model's files are read by the same code as for the embedded engine, so answers are the same.
vLLM is told how a text's hidden states become one vector, whatever it finds in the files itself,
and is asked for the numbers before the activation: which function makes scores of logits, and
whether vectors are normalized and cut, is decided here. Only Dense layers are vLLM's, which can't
be told to leave them out.

Source: vllm/model_executor/layers/pooler/ and models/adapters.py of vLLM 0.32
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import PreTrainedTokenizerBase

from deployments.contract.model_spec import ModelSpec, number
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.plan.sizes import NO_LIMIT_LEN
from deployments.pooling.embedder import Embedder
from deployments.pooling.model_outline import (
    fit_length,
    load_outline,
    load_text_tokenizer,
    put_into_lower_case,
    reads_types,
)
from deployments.pooling.packed_backbone import TextModel
from deployments.pooling.pooling_model import activate, choose_activation
from deployments.pooling.probe_texts import ProbeTexts
from deployments.pooling.request_queue import TokenIds
from deployments.pooling.sentence_files import Dense, PoolingMode, SentenceFiles

if TYPE_CHECKING:
    from vllm.config import ModelConfig as VllmModelConfig

POOLING_TYPES: Final[dict[PoolingMode, str]] = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
"""Ways to make a vector of a text's hidden states, by vLLM's names."""


@dataclass(frozen=True, slots=True)
class PooledModel:
    """A model by its files.

    Attributes:
        model: Its modules and configuration, without weights.
        tokenizer: Its tokenizer.
        max_model_len: The most tokens of one text, special ones included.
        reads_types: Whether the model tells a pair's texts apart by the types of tokens.
        probe: A short text that the model accepts.
    """

    model: TextModel
    tokenizer: PreTrainedTokenizerBase
    max_model_len: int
    reads_types: bool
    probe: TokenIds

    @property
    def task(self) -> str:
        """What vLLM is asked for: classify or embed."""
        return "embed" if isinstance(self.model, Embedder) else "classify"

    @property
    def pooler_config(self) -> dict[str, Any]:
        """The fields of vLLM's PoolerConfig; a classifier's architecture has its own pooling."""
        if not isinstance(self.model, Embedder):
            return {}
        (mode,) = self.model.files.pooling
        return {"seq_pooling_type": POOLING_TYPES[mode]}

    def finish(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the row that answers a text, of vLLM's logits or vector before the activation.

        Args:
            numbers: [labels], or [width] behind the Dense layers; float32, on the CPU.
        """
        if not isinstance(self.model, Embedder):
            return activate(numbers, choose_activation(self.model.config))
        if "normalize" in self.model.files.steps:
            numbers = torch.nn.functional.normalize(numbers, dim=-1)
        return numbers[: self.model.width]


def read_model(spec: ModelSpec) -> PooledModel:
    """Read a model's files.

    Raises:
        UnsupportedModelError: The model does not do its task, or not on vLLM; one line says why.
    """
    entry = spec.entry
    model = load_outline(spec.source, task=entry.task, revision=entry.revision)
    if isinstance(model, Embedder):
        _check_files(spec.source, model.files)
    else:
        choose_activation(model.config)  # refuses those that are not served
    tokenizer = load_text_tokenizer(spec.source, model.config, revision=entry.revision)
    put_into_lower_case(spec.source, tokenizer, model)
    return PooledModel(
        model,
        tokenizer,
        fit_length(number(entry.max_model_len) or NO_LIMIT_LEN, model),
        reads_types(model),
        ProbeTexts.of(model, tokenizer).of_length(1),
    )


def _check_files(source: str, files: SentenceFiles) -> None:
    """Refuse what vLLM does not do, or does in another order."""
    if len(files.pooling) > 1:
        raise UnsupportedModelError(
            f"can't load {source!r}: it joins vectors of {' and '.join(files.pooling)}, and vLLM "
            "pools in one way; leave out `engine: vllm`"
        )
    kinds = [isinstance(step, Dense) for step in files.steps]
    if kinds != sorted(kinds, reverse=True):
        raise UnsupportedModelError(
            f"can't load {source!r}: it normalizes before a Dense layer, and vLLM does that last; "
            "leave out `engine: vllm`"
        )


def check_layers(source: str, model: TextModel, config: "VllmModelConfig") -> None:
    """Refuse a model whose Dense layers vLLM has not loaded: it goes on without them.

    Raises:
        UnsupportedModelError: There are other layers in vLLM than in the files.
    """
    from vllm.model_executor.models.adapters import _load_st_projector

    if not isinstance(model, Embedder):
        return
    expected = sum(isinstance(step, Dense) for step in model.files.steps)
    layers = _load_st_projector(config) if expected else None
    found = sum(isinstance(layer, torch.nn.Linear) for layer in layers or ())
    if found != expected:
        raise UnsupportedModelError(
            f"can't load {source!r}: vLLM has loaded {found} of its {expected} Dense layers; leave "
            "out `engine: vllm`"
        )
