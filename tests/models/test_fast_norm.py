import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from models.training.fast_norm import fast_norms


def norm_and_gradients(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    norm = Gemma3RMSNorm(x.shape[-1])
    norm.weight = torch.nn.Parameter(weight.clone())
    x = x.clone().requires_grad_()
    output = norm(x)
    output.square().sum().backward()
    assert x.grad is not None
    assert norm.weight.grad is not None
    return output.detach(), x.grad, norm.weight.grad


@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradients_equal_those_of_the_stock_norm(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, 64, generator=generator)
    weight = torch.randn(64, generator=generator)
    stock = norm_and_gradients(x, weight)
    with fast_norms():
        fast = norm_and_gradients(x, weight)
    for ours, theirs in zip(fast, stock, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_stock_norm_is_restored_afterwards() -> None:
    stock = Gemma3RMSNorm.forward
    with pytest.raises(RuntimeError, match="stop"), fast_norms():
        raise RuntimeError("stop")
    assert Gemma3RMSNorm.forward is stock
