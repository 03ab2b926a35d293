"""A model that computes a row of numbers from a text's token ids: scores of labels, or a vector.

Sequences are packed one after another if the model's code and the device allow it. Otherwise they
are padded to the longest of their micro-batch; the worker sorts them by length first. If padding
changes a model's results, its sequences run one by one.

On a GPU a batch goes there and its rows come back by copies that wait for nothing, and a call waits
only for its own rows. So another thread prepares and launches the next batch meanwhile.
"""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Final, Literal

import torch
from transformers import PreTrainedConfig

from deployments.compute.host_to_device import fetch, pin
from deployments.compute.work_watch import LEAST_S
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.plan.memory_budget import POOLER_STEP_TOKENS
from deployments.pooling.embedder import Embedder
from deployments.pooling.packed_backbone import Packing, TextModel, known, pad, rows_of
from deployments.pooling.request_queue import TokenIds

Layout = Literal["packed", "padded", "one by one"]
"""How a micro-batch is laid out for a model."""

Activation = Literal["softmax", "sigmoid", "identity"]

NAMED_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
}
"""Activations by the names that sentence-transformers writes."""


class PoolingModel:
    """Answers batches of texts with one model.

    Attributes:
        model: It computes the rows, and holds all weights.
    """

    def __init__(
        self,
        model: TextModel,
        layout: Layout,
        probe: TokenIds,
        num_lanes: int = 1,
        max_batch_s: float = LEAST_S,
        *,
        max_batched_tokens: int = POOLER_STEP_TOKENS,
    ) -> None:
        """Wrap a model.

        Args:
            model: In evaluation mode, on its device.
            layout: The layout that `model_loader.prepare` returned.
            probe: A short text that the model accepts.
            num_lanes: How many threads may run batches at once.
            max_batch_s: Seconds after which a batch can only hang.
            max_batched_tokens: The most tokens of a batch; a longer text runs by itself.
        """
        self.model = model
        self._launching = Lock()
        is_embedder = isinstance(model, Embedder)
        self._activation = "identity" if is_embedder else choose_activation(model.config)
        self._pad_token_id: int | None = model.config.get_text_config().pad_token_id
        self.layout = layout
        self.probe = probe
        self.num_lanes = num_lanes
        self.max_batch_s = max_batch_s
        self.max_batched_tokens = max_batched_tokens

    @property
    def is_padded(self) -> bool:
        """Whether each sequence of a batch costs as much as the longest."""
        return self.layout == "padded"

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    @torch.inference_mode()
    def __call__(
        self, sequences: Sequence[TokenIds], type_ids: Sequence[TokenIds | None] = ()
    ) -> torch.Tensor:
        """Return a row for each sequence, [len(sequences), width], float32, on the CPU.

        A row is NaN if any of the model's numbers for it is not finite.

        Args:
            sequences: Token ids.
            type_ids: Which of a pair's texts each token belongs to; None for a sequence if all
                belong to the first, empty if that is so for all sequences.
        """
        if self.layout == "one by one" and len(sequences) > 1:
            types = type_ids or [None] * len(sequences)
            return torch.cat(
                [self([ids], [own]) for ids, own in zip(sequences, types, strict=True)]
            )
        token_ids, mask = pad(list(map(torch.tensor, sequences)), self._pad_token_id or 0)
        inputs = {"input_ids": token_ids, "attention_mask": mask}
        if any(type_ids):
            pairs = zip(sequences, type_ids, strict=True)
            own_types = [torch.tensor(own or (0,) * len(ids)) for ids, own in pairs]
            inputs["token_type_ids"], _ = pad(own_types, 0)
        if self.device.type == "cpu":
            return self._scores(inputs)
        lengths = [len(ids) for ids in sequences]
        return self._run_on_gpu(inputs, lengths)

    def _run_on_gpu(
        self, inputs: Mapping[str, torch.Tensor], lengths: Sequence[int]
    ) -> torch.Tensor:
        """Return the rows of a batch on the host; wait for no other thread's batch.

        Args:
            inputs: The model's arguments on the host, [n, length] each, padded on the right.
            lengths: Tokens of each of the n sequences.
        """
        device, width = self.device, inputs["input_ids"].shape[1]
        pinned = {name: pin(tensor, device) for name, tensor in inputs.items()}
        # One thread launches at a time: what two steps hold at once was not planned.
        with self._launching:
            packing = Packing.of(lengths, width, device) if self.layout == "packed" else None
            placed = {name: each.to(device, non_blocking=True) for name, each in pinned.items()}
            with known(packing):
                fetched = fetch(self._scores(placed))
        return fetched.wait()

    def _scores(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the rows of a batch, [n, width], float32, NaN where one is not finite.

        Args:
            inputs: The model's arguments, [n, length] each, on its device.
        """
        rows = rows_of(self.model, **inputs).float()
        is_finite = rows.isfinite().all(dim=1, keepdim=True)
        return activate(rows, self._activation).masked_fill(~is_finite, torch.nan)


def activate(rows: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the scores of logits, [..., labels]."""
    match activation:
        case "softmax":
            return rows.softmax(dim=-1)
        case "sigmoid":
            return rows.sigmoid()
        case "identity":
            return rows


def choose_activation(config: PreTrainedConfig) -> Activation:
    """Return the function from logits to scores; a regression's outputs stay unchanged.

    A cross-encoder's configuration may name it, as sentence-transformers writes it.

    Raises:
        UnsupportedModelError: It names another function than these.

    Source: transformers, pipelines/text_classification.py; sentence-transformers 6.2,
    cross_encoder/model.py, get_default_activation_fn
    """
    named = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    if named is not None:
        if named not in NAMED_ACTIVATIONS:
            raise UnsupportedModelError(
                f"its config.json names the activation {named}; served are "
                f"{', '.join(NAMED_ACTIVATIONS)}"
            )
        return NAMED_ACTIVATIONS[named]
    if config.problem_type == "regression":
        return "identity"
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"
