"""What layers with weights in a layout of their own have in common."""

from abc import ABC, abstractmethod

import torch


class PackedLinear(torch.nn.Module, ABC):
    """A linear layer, from [..., features] to [..., features] as nn.Linear.

    Attributes:
        out_features: Outputs of a row.
        in_features: Inputs of a row.
        num_bytes: Bytes of all that it holds.
    """

    num_bytes: int

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take the sizes; a subclass packs a copy of the weights.

        Args:
            weight: [out_features, in_features], on the CPU.
            bias: [out_features], or None.
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape

    @staticmethod
    @abstractmethod
    def fits(linear: torch.nn.Linear) -> bool:
        """Return whether this class can hold a layer's weights, on this machine."""

    @abstractmethod
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the layer to [..., in_features]."""

    def extra_repr(self) -> str:
        """Return what nn.Linear returns."""
        return f"in_features={self.in_features}, out_features={self.out_features}"
