"""Linear layers whose weights are stored and multiplied as int8.

Decoding on a CPU takes about as long as reading the weights, and int8 weights are half the bytes of
bfloat16. Each output has a scale, computed when the model is loaded. Each row has a scale too,
computed in each call:

    y[i, o] = (sum over k of q(x)[i, k] q(w)[o, k]) scale(x)[i] scale(w)[o] + bias[o]

The sum adds integers, so it is exact, and a row's result does not depend on the other rows of its
batch. One scale for all rows of a step would be simpler, but then sequences would change each
other's text.

The operators are the ones that torch's compiler emits. They are private, so `int8_obstacle` tries
them before they are used.

Source: torch/_inductor/fx_passes/quantization.py.
"""

from functools import cache
from typing import Any

import torch

from deployments.compute.cpu.memory import use_huge_pages_for

LARGEST = 127
"""The largest integer. The range is symmetric, so that zero is exact."""

OFFSET = 128
"""Zero point of a row: oneDNN's fast kernels take unsigned rows."""

SMALLEST = 1e-30
"""Lower bound on the largest value of a row or an output, so that no scale is zero."""

OUTPUTS_AT_ONCE = 4096
"""Outputs quantised at a time, which bounds the float32 copy of the weights."""


class Int8Linear(torch.nn.Module):
    """A linear layer on int8 weights, from [..., features] to [..., features] as nn.Linear."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Quantise and reorder a copy of the weights.

        Args:
            weight: [out_features, in_features], of any floating dtype, on the CPU.
            bias: [out_features], or None.
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        integers, self._scales = quantize(weight)
        # Not a buffer: an opaque layout can be neither saved nor moved.
        self._packed = torch.ops.onednn.qlinear_prepack(integers, None)
        use_huge_pages_for(self._packed)
        self._zero = torch.zeros(1, dtype=torch.int32)
        self._bias = None if bias is None else bias.detach().to(torch.float32, copy=True)
        held = (integers, self._scales, self._bias)
        self.num_bytes = sum(tensor.nbytes for tensor in held if tensor is not None)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the layer to [..., in_features]."""
        values = rows.float()
        scales = values.abs().amax(-1, keepdim=True).clamp_min_(SMALLEST).div_(LARGEST)
        # The conversion truncates, and all values are positive, so adding 0.5 rounds.
        integers = values.div(scales).add_(OFFSET + 0.5).to(torch.uint8)
        output = self._multiply(integers)
        if self._bias is None:
            return output.mul_(scales).to(rows.dtype)
        return torch.addcmul(self._bias, output, scales).to(rows.dtype)

    def _multiply(self, integers: torch.Tensor) -> torch.Tensor:
        """Return the products in float32, multiplied by the weights' scales."""
        output = _product()(
            *(integers.flatten(0, -2), 1.0, OFFSET),
            *(self._packed, self._scales, self._zero),
            *(None, 1.0, 0, torch.float32),  # no bias; the output's scale, zero point and type
            *("none", [], ""),  # no operator after the product
        )
        assert isinstance(output, torch.Tensor)
        return output.view(*integers.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return what nn.Linear returns."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 weights [out_features, in_features] and float32 scales [out_features]."""
    integers = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for start in range(0, weight.shape[0], OUTPUTS_AT_ONCE):
        part = slice(start, start + OUTPUTS_AT_ONCE)
        values = weight[part].detach().float()
        scales[part] = values.abs().amax(-1).clamp_min_(SMALLEST).div_(LARGEST)
        integers[part] = values.div(scales[part, None]).round_()
    return integers, scales


@cache
def int8_obstacle() -> str | None:
    """Return why this machine can't run int8 layers, or None if it can.

    The probe uses the largest products: CPUs without VNNI add pairs of products in 16 bits, and
    these pairs overflow.
    """
    rows = torch.tensor([[1.0] * 64, [-1.0] * 64, [1.0, -0.5] * 32])
    weight = torch.tensor([[1.0] * 64, [-1.0] * 64, [0.5, 0.25] * 32])
    try:
        found = Int8Linear(weight, torch.ones(3))(rows)
    except (AttributeError, RuntimeError) as error:
        summary = str(error).strip().partition("\n")[0]
        return f"this build of torch lacks the operators ({summary})"
    if torch.allclose(found, rows @ weight.T + 1, atol=0.5):
        return None
    return "this CPU adds 8-bit products inexactly (it lacks VNNI)"


@cache
def _product() -> Any:
    # Named overload: resolving it by the arguments takes 3 us in each call.
    return torch.ops.onednn.qlinear_pointwise.default
