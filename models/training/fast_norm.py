"""Gemma 3's RMSNorm in fewer passes over memory, for training on the CPU only.

The stock module makes eight float32 intermediates per call, a fifth of a training step. The values
agree to bfloat16's precision (tested), and the saved model runs the stock module.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm


class _ScaledNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        inverse = torch.rsqrt(norms.square().div_(x.shape[-1]).add_(eps)).to(x.dtype)
        normed = x * inverse
        scale = (1.0 + weight).to(x.dtype)
        ctx.save_for_backward(normed, inverse, scale)
        return normed * scale

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        normed, inverse, scale = ctx.saved_tensors  # type: ignore[attr-defined] # set by torch
        along = grad * normed
        weight_grad = along.reshape(-1, along.shape[-1]).sum(0, dtype=torch.float32)
        mean = torch.matmul(along, scale.unsqueeze(-1)) / scale.shape[0]
        return (grad * scale).sub_(normed * mean).mul_(inverse), weight_grad, None


def _forward(module: Gemma3RMSNorm, x: Tensor) -> Tensor:
    # torch leaves `apply` untyped.
    return _ScaledNorm.apply(x, module.weight, module.eps)  # type: ignore[no-untyped-call,no-any-return]


@contextmanager
def fast_norms() -> Iterator[None]:
    """Replace the norm's forward inside the context."""
    stock = Gemma3RMSNorm.forward
    Gemma3RMSNorm.forward = _forward  # type: ignore[method-assign] # deliberate, and undone below
    try:
        yield
    finally:
        Gemma3RMSNorm.forward = stock  # type: ignore[method-assign] # restores the stock method
