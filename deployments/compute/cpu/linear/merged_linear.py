"""Merges linear layers that read the same rows into one product.

Queries, keys and values are three products of one input; the gate and up projections of an MLP are
two. One product over the joined weights costs less than several: fewer calls, and fewer waits of
the compute threads for each other.

The model still calls its layers one by one. The first call with an input computes all outputs, and
the other layers take theirs if they get the very same tensor. Pending outputs are kept per thread,
so several threads may run one model.
"""

import threading
from collections.abc import Sequence

import torch

from deployments.compute.cpu.linear.packed_linear import PackedLinear
from deployments.compute.cpu.linear.prepacked_linear import PrepackedLinear


class _PendingOutputs(threading.local):
    """Outputs that a thread has computed and not taken yet."""

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.outputs: dict[int, torch.Tensor] = {}


class MergedLinear(torch.nn.Module):
    """Several linear layers of one input, as one."""

    def __init__(
        self, linears: Sequence[torch.nn.Linear], layer: type[PackedLinear] = PrepackedLinear
    ) -> None:
        """Join the weights.

        Args:
            linears: Layers of one input size; either all have a bias or none does.
            layer: Class of the layer that holds the joined weights.
        """
        super().__init__()
        weights: list[torch.Tensor] = [linear.weight for linear in linears]
        biases: list[torch.Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        self._joined = layer(torch.cat(weights), torch.cat(biases) if biases else None)
        self._sizes = [linear.out_features for linear in linears]
        self._pending = _PendingOutputs()

    def take(self, part: int, rows: torch.Tensor) -> torch.Tensor:
        """Return one layer's output, and drop it from the pending ones.

        Args:
            part: The layer's index.
            rows: [..., in_features].
        """
        pending = self._pending
        if rows is not pending.rows or part not in pending.outputs:
            outputs = self._joined(rows).split(self._sizes, dim=-1)
            pending.rows, pending.outputs = rows, dict(enumerate(outputs))
        output = pending.outputs.pop(part)
        if not pending.outputs:
            pending.rows = None
        return output


class MergedLinearPart(torch.nn.Module):
    """Replaces one of the merged layers in the model."""

    def __init__(self, merged: MergedLinear, part: int) -> None:
        super().__init__()
        self._merged = merged
        self._part = part

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the layer to [..., in_features]."""
        return self._merged.take(self._part, rows)
