"""Linear layers that read the same rows, computed as one.

Queries, keys and values are three products of one input, as are the gate and the up projection of
an MLP. One product over the weights of all costs less than several: fewer calls, and fewer waits
of the compute threads for each other.

The model still calls its layers one by one. The first that sees an input computes for all, and the
others take their part, if they are given the very same tensor. What is kept between the calls is
each thread's own, so several may run one model.
"""

import threading
from collections.abc import Sequence

import torch

from deployments.engine.cpu.int8_linear import Int8Linear
from deployments.engine.cpu.prepacked_linear import PrepackedLinear

Layer = type[PrepackedLinear] | type[Int8Linear]


class _Kept(threading.local):
    """What the first layer has computed for the others on a thread."""

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.outputs: dict[int, torch.Tensor] = {}


class SharedInput(torch.nn.Module):
    """Several linear layers side by side."""

    def __init__(self, linears: Sequence[torch.nn.Linear], layer: Layer = PrepackedLinear) -> None:
        """Join the weights.

        Args:
            linears: Layers of one input size; either all with a bias or none.
            layer: What holds the joined weights.
        """
        super().__init__()
        weights: list[torch.Tensor] = [linear.weight for linear in linears]
        biases: list[torch.Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        self._joined = layer(torch.cat(weights), torch.cat(biases) if biases else None)
        self._sizes = [linear.out_features for linear in linears]
        self._kept = _Kept()

    def take(self, part: int, rows: torch.Tensor) -> torch.Tensor:
        """Return one layer's output, and forget it.

        Args:
            part: The layer's index.
            rows: [..., in_features].
        """
        kept = self._kept
        if rows is not kept.rows or part not in kept.outputs:
            outputs = self._joined(rows).split(self._sizes, dim=-1)
            kept.rows, kept.outputs = rows, dict(enumerate(outputs))
        output = kept.outputs.pop(part)
        if not kept.outputs:
            kept.rows = None
        return output


class SharedInputPart(torch.nn.Module):
    """Stands in the place of one of the layers."""

    def __init__(self, shared: SharedInput, part: int) -> None:
        """Take the layer's output from what all share."""
        super().__init__()
        self._shared = shared
        self._part = part

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the layer to [..., in_features]."""
        return self._shared.take(self._part, rows)
