"""An embedding model: a stock backbone, and what sentence-transformers' files put behind it.

Source: sentence-transformers 6.2, sentence_transformer/modules/pooling.py, base/modules/dense.py
and normalize.py
"""

from typing import Any, Final, assert_never

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig, PreTrainedModel

from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.pooling.sentence_files import Dense, PoolingMode, SentenceFiles, find_file


class Embedder(torch.nn.Module):
    """Makes a vector from each text.

    It has what `packed_backbone` needs of a stock model: a backbone, which can be replaced.
    """

    base_model_prefix: Final = "backbone"

    def __init__(
        self, backbone: PreTrainedModel, files: SentenceFiles, layers: torch.nn.Module
    ) -> None:
        """Join the parts of a model.

        Args:
            backbone: The stock model, without its own pooler.
            files: What is done with its hidden states.
            layers: The Dense layers of `files`, in order.
        """
        super().__init__()
        self.backbone = backbone
        self.config: PreTrainedConfig = backbone.config
        self.files = files
        self.layers = layers
        self._set_attention = backbone.set_attn_implementation

    @property
    def base_model(self) -> torch.nn.Module:
        """The backbone, or what replaces it."""
        return self.backbone

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return next(self.parameters()).dtype

    @property
    def width(self) -> int:
        """The number of numbers in a vector."""
        return self.files.width(self.config.get_text_config().hidden_size)

    def set_attn_implementation(self, name: str) -> None:
        """Choose the backbone's attention."""
        self._set_attention(name)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **others: Any
    ) -> torch.Tensor:
        """Return the vectors of texts.

        Args:
            input_ids: [batch, length], padded on the right.
            attention_mask: [batch, length], 1 where there is a token.
            **others: Further arguments for the backbone.

        Returns:
            [batch, width], float32.
        """
        output = self.backbone(input_ids=input_ids, attention_mask=attention_mask, **others)
        hidden: torch.Tensor = output["last_hidden_state"]
        vectors = torch.cat(
            [_pool(hidden, attention_mask, mode) for mode in self.files.pooling], dim=-1
        )
        layers = iter(self.layers.children())
        for step in self.files.steps:
            if step == "normalize":
                vectors = torch.nn.functional.normalize(vectors.float(), dim=-1)
            else:
                vectors = next(layers)(vectors.to(self.dtype))
        return vectors.float()[:, : self.width]


def _pool(hidden: torch.Tensor, mask: torch.Tensor, mode: PoolingMode) -> torch.Tensor:
    """Return a vector for each text, [batch, hidden_size], of [batch, length, hidden_size]."""
    match mode:
        case "cls":
            return hidden[:, 0]
        case "lasttoken":
            rows = torch.arange(len(hidden), device=hidden.device)
            return hidden[rows, mask.sum(dim=1) - 1]
        case "mean":
            # In float32: in bfloat16 the sum of a long text loses most of its digits.
            total = torch.bmm(mask[:, None].float(), hidden.float())[:, 0]
            return total / mask.sum(dim=1, keepdim=True)
        case _:
            assert_never(mode)


def make_layers(files: SentenceFiles, dtype: torch.dtype) -> torch.nn.Sequential:
    """Return a model's Dense layers, with weights that are not set."""
    dense = [step for step in files.steps if isinstance(step, Dense)]
    return torch.nn.Sequential(*(_layer(each, dtype) for each in dense))


def load_layers(
    source: str, revision: str | None, files: SentenceFiles, dtype: torch.dtype
) -> torch.nn.Sequential:
    """Load a model's Dense layers.

    Raises:
        UnsupportedModelError: A layer has no weights as safetensors.
        RuntimeError: Its weights don't fit.
    """
    layers = make_layers(files, dtype)
    dense = [step for step in files.steps if isinstance(step, Dense)]
    for step, layer in zip(dense, layers, strict=True):
        path = find_file(source, revision, f"{step.folder}/model.safetensors")
        if path is None:
            raise UnsupportedModelError(
                f"can't load {source!r}: {step.folder} has no model.safetensors"
            )
        weights = load_file(path)
        layer.load_state_dict({name.replace("linear.", "0."): weights[name] for name in weights})
    return layers


def _layer(step: Dense, dtype: torch.dtype) -> torch.nn.Sequential:
    linear = torch.nn.Linear(step.in_features, step.out_features, bias=step.bias, dtype=dtype)
    return torch.nn.Sequential(linear, getattr(torch.nn, step.activation)())
