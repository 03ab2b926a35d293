"""A sequence classifier, which computes the probabilities of labels from token ids.

On a CPU, sequences are packed one after another if the model's code allows it. Otherwise, and on a
GPU, they are padded to the longest of their micro-batch; the worker sorts them by length first. If
padding changes a model's results, its sequences run one by one.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from deployments.classifier.packed_backbone import pad
from deployments.classifier.request_queue import TokenIds
from deployments.compute.work_watch import LEAST_S

Layout = Literal["packed", "padded", "one by one"]
"""How a micro-batch is laid out for a model."""

Activation = Literal["softmax", "sigmoid", "identity"]


class SequenceClassifier:
    """Classifies batches with one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        layout: Layout,
        probe: TokenIds,
        num_lanes: int = 1,
        max_batch_s: float = LEAST_S,
    ) -> None:
        """Wrap a model.

        Args:
            model: In evaluation mode, on its device.
            layout: The layout that `model_loader.prepare` returned.
            probe: A short text that the model accepts.
            num_lanes: How many threads may run batches at once.
            max_batch_s: Seconds after which a batch can only hang.
        """
        self._model = model
        self._activation = choose_activation(model.config)
        self._pad_token_id: int | None = model.config.get_text_config().pad_token_id
        self.layout = layout
        self.probe = probe
        self.num_lanes = num_lanes
        self.max_batch_s = max_batch_s

    @property
    def is_padded(self) -> bool:
        """Whether each sequence of a batch costs as much as the longest."""
        return self.layout == "padded"

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._model.device

    @torch.inference_mode()
    def __call__(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return probabilities, [len(sequences), num_labels], float32, on the CPU.

        A row is NaN if any of its logits is not finite.
        """
        if self.layout == "one by one" and len(sequences) > 1:
            return torch.cat([self([sequence]) for sequence in sequences])
        rows = [torch.tensor(sequence) for sequence in sequences]
        token_ids, mask = pad(rows, self._pad_token_id or 0)
        logits = self._model(
            input_ids=token_ids.to(self.device), attention_mask=mask.to(self.device)
        ).logits.float()
        is_finite = logits.isfinite().all(dim=1, keepdim=True)
        return self._activate(logits).masked_fill(~is_finite, torch.nan).cpu()

    def _activate(self, logits: torch.Tensor) -> torch.Tensor:
        match self._activation:
            case "softmax":
                return logits.softmax(dim=-1)
            case "sigmoid":
                return logits.sigmoid()
            case "identity":
                return logits


def choose_activation(config: PreTrainedConfig) -> Activation:
    """Return the function from logits to probabilities; a regression's outputs stay unchanged.

    Source: transformers, pipelines/text_classification.py
    """
    if config.problem_type == "regression":
        return "identity"
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"
