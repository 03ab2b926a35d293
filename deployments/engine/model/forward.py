"""The forward pass of one packed step: the stock model's own, or what stands in for it."""

from typing import Protocol

import torch
from transformers import PreTrainedModel

from deployments.engine.packed_step import PackedStep


class Forward(Protocol):
    """From the rows of a step to the logits of those that are due."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, due: torch.Tensor, step: PackedStep
    ) -> torch.Tensor:
        """Return the logits [1, k, vocab], in the model's type.

        Args:
            token_ids: [1, n], int64.
            positions: [1, n], int64.
            due: [k], int64, indices of rows.
            step: Where the rows belong.
        """
        ...


class StockForward:
    """The model's own forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take a model that attends over slots."""
        self._model = model

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, due: torch.Tensor, step: PackedStep
    ) -> torch.Tensor:
        """Run the model; see `Forward`.

        Raises:
            ValueError: The model gives other logits than those asked for.
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
            raise ValueError("the model does not know logits_to_keep")
        return output.logits
