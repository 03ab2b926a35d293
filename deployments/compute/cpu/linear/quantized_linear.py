"""Linear layers whose weights are stored as integers of 8 or 4 bits.

Decoding on a CPU takes about as long as reading the weights, and these are a half or a quarter of
the bytes of bfloat16. Each output has a scale for each group of 32 inputs:

    y[i, o] = sum over groups g of (sum over k in g of x[i, k] q(w)[o, k]) scale(w)[o, g] + bias[o]

Rows stay as they are, so only the weights are rounded. The kernel is that of small batches, which
unpacks the integers; a row's result does not depend on the other rows of its batch.

Source: the scales are those of GGUF's Q4_0 and Q8_0 (llama.cpp, ggml-quants.c): a group's largest
weight becomes the lowest integer, since -8 has no counterpart among the integers of 4 bits.
"""

from typing import ClassVar

import torch

from deployments.compute.cpu.jit.openmp import find_parallel
from deployments.compute.cpu.linear.packed_layout import BLOCK
from deployments.compute.cpu.linear.packed_linear import PackedLinear
from deployments.compute.cpu.linear.small_batch_kernel import (
    SmallBatchKernel,
    make_quantized_kernel,
)
from deployments.compute.cpu.linear.small_batch_linear import quantized_linear
from deployments.compute.cpu.linear.tiling import UNROLLED, Arithmetic, find_arithmetic
from deployments.compute.host_memory import use_huge_pages
from deployments.plan.model_shape import SCALED_INPUTS
from deployments.plan.processor import features

WEIGHTS_AT_ONCE = 2**22
"""Weights quantized at a time, which bounds the memory of all that lies between."""


class QuantizedLinear(PackedLinear):
    """A linear layer on integer weights."""

    weight_bits: ClassVar[int]

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Quantize a copy of the weights.

        Args:
            weight: [out_features, in_features], of any floating dtype, on the CPU; see `fits`.
            bias: [out_features], or None.
        """
        super().__init__(weight, bias)
        arithmetic = _kernel(weight.dtype, self.weight_bits).arithmetic
        self._dtype = torch.bfloat16 if arithmetic.is_bfloat16 else torch.float32
        num_blocks = -(-self.out_features // BLOCK)
        packed_inputs = self.in_features * BLOCK // arithmetic.packed_vectors
        lanes = arithmetic.elements
        # Not buffers: a model that is moved or converted must not convert its scales.
        self._integers = torch.empty(
            num_blocks, packed_inputs // lanes, lanes, dtype=_packed_dtype(arithmetic)
        )
        self._scales = torch.empty(
            num_blocks, self.in_features // SCALED_INPUTS, BLOCK, dtype=self._dtype
        )
        blocks_at_once = max(1, WEIGHTS_AT_ONCE // (BLOCK * self.in_features))
        for first in range(0, num_blocks, blocks_at_once):
            blocks = slice(first, min(first + blocks_at_once, num_blocks))
            part = weight.detach()[blocks.start * BLOCK : blocks.stop * BLOCK].float()
            if missing := -len(part) % BLOCK:
                part = torch.nn.functional.pad(part, (0, 0, 0, missing))
            values, factors = quantize(part, self.weight_bits, self._dtype)
            self._integers[blocks] = pack(values, arithmetic)
            self._scales[blocks] = factors.view(-1, BLOCK, factors.shape[1]).transpose(1, 2)
        self._bias = torch.zeros(num_blocks * BLOCK)
        if bias is not None:
            self._bias[: self.out_features] = bias.detach()
        use_huge_pages(self._integers.data_ptr(), self._integers.nbytes)
        self.num_bytes = sum(t.nbytes for t in (self._integers, self._scales, self._bias))

    @staticmethod
    def fits(linear: torch.nn.Linear) -> bool:
        """Return whether its inputs can be divided into groups."""
        return linear.in_features % SCALED_INPUTS == 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the layer to [..., in_features]."""
        held = self._integers, self._scales, self._bias
        output: torch.Tensor = quantized_linear(rows.to(self._dtype), *held, self.weight_bits)
        if len(self._bias) > self.out_features:
            output = output[..., : self.out_features]
        return output.to(rows.dtype)


class Int8Linear(QuantizedLinear):
    """A linear layer on weights of 8 bits."""

    weight_bits = 8


class Int4Linear(QuantizedLinear):
    """A linear layer on weights of 4 bits."""

    weight_bits = 4


def quantize(
    weight: torch.Tensor, weight_bits: int, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest integers and their scales.

    Args:
        weight: [out_features, in_features], float32.
        weight_bits: 4 or 8.
        scale_dtype: The type to which scales are rounded, before the weights are.

    Returns:
        int8 [out_features, in_features], and scales [out_features, groups].
    """
    lowest, highest = {8: (-127, 127), 4: (-8, 7)}[weight_bits]
    groups = weight.view(len(weight), -1, SCALED_INPUTS)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = largest.div_(lowest).to(scale_dtype)
    divisors = scales.float()
    divisors[divisors == 0] = 1
    integers = groups.div(divisors).round_().clamp_(lowest, highest)
    return integers.to(torch.int8).flatten(1), scales.squeeze(-1)


def pack(integers: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """Return integers in the order in which the kernel unpacks them.

    Elements have the order of oneDNN's layout, in vectors, but that the strips of a turn are one
    after the other. Each lane of a packed vector holds the integers of this lane in as many vectors
    of elements, the first in its lowest bits. Where the bytes of elements are looked up, a packed
    byte is a sign and a size, and runs of 8 bytes are taken from two vectors in turn.

    Args:
        integers: int8 [out_features, in_features].
        arithmetic: What the kernel is compiled for.

    Returns:
        int16 or int32 [blocks, packed vectors of a block, lanes].
    """
    bits = arithmetic.weight_bits
    assert bits is not None
    strips = integers.view(
        *(-1, arithmetic.num_strips, arithmetic.strip),
        *(integers.shape[1] // arithmetic.turn_inputs, UNROLLED, arithmetic.word_inputs),
    )
    # blocks, turns, strips, words, columns, inputs
    elements = strips.permute(0, 3, 1, 4, 2, 5).reshape(
        len(strips), -1, arithmetic.packed_vectors, arithmetic.elements
    )
    if arithmetic.looks_up_bytes:
        octets = torch.where(elements < 0, elements.abs() - 128, elements)
        runs = octets.view(*octets.shape[:-1], -1, 8).transpose(2, 3)
        return runs.flatten(2).view(_packed_dtype(arithmetic))
    shape = len(strips), elements.shape[1], arithmetic.elements
    packed = torch.zeros(shape, dtype=_packed_dtype(arithmetic))
    for i in range(arithmetic.packed_vectors):
        packed |= (elements[:, :, i].to(packed.dtype) & (2**bits - 1)) << (bits * i)
    return packed


def _packed_dtype(arithmetic: Arithmetic) -> torch.dtype:
    return torch.int16 if arithmetic.is_bfloat16 else torch.int32


def quantization_obstacle() -> str | None:
    """Return why this machine can't run quantized layers, or None if it can."""
    if find_arithmetic(features(), is_bfloat16=False) is None:
        return "this processor has no AVX2"
    if find_parallel() is None:
        return "torch's OpenMP library has no GOMP_parallel, so one thread would compute"
    return None


def _kernel(dtype: torch.dtype, weight_bits: int) -> SmallBatchKernel:
    kernel = make_quantized_kernel(dtype, weight_bits)
    assert kernel is not None, quantization_obstacle()
    return kernel
