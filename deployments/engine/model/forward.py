"""The forward pass of one packed step: the interface, and the stock model's own pass.

`traced_forward` holds the faster implementation.
"""

from typing import Protocol

import torch
from transformers import PreTrainedModel

from deployments.engine.attention.packed_step import PackedStep


class Forward(Protocol):
    """Computes logits for the rows of a step that need them."""

    @property
    def description(self) -> str:
        """How the pass runs, in words."""
        ...

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, due: torch.Tensor, step: PackedStep
    ) -> torch.Tensor:
        """Return the logits [1, k, vocab], in the model's dtype.

        Args:
            token_ids: [1, n], int64.
            positions: [1, n], int64.
            due: [k], int64, indices of the rows whose logits are wanted.
            step: The extents and position of each row.
        """
        ...


class StockForward:
    """The model's own forward pass."""

    description = "not traced"

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap a model that attends over the KV cache."""
        self._model = model

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, due: torch.Tensor, step: PackedStep
    ) -> torch.Tensor:
        """Run the model; see `Forward`.

        Raises:
            ValueError: The model ignores `logits_to_keep`.
        """
        output = self._model(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=due,
            packed_step=step,
        )
        assert isinstance(output.logits, torch.Tensor)
        if output.logits.shape[1] != len(due):
            raise ValueError("the model returns other logits than logits_to_keep asks for")
        return output.logits
