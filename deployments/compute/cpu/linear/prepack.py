"""Replaces a model's linear layers by prepacked ones."""

from typing import TypeGuard

import torch
from transformers.pytorch_utils import Conv1D

from deployments.compute.cpu.linear.packed_linear import PackedLinear
from deployments.compute.cpu.linear.prepacked_linear import PrepackedLinear, can_prepack
from deployments.compute.merged_linear import merge_siblings, reads_weights


@torch.no_grad()
def prepack(model: torch.nn.Module, layer: type[PackedLinear] = PrepackedLinear) -> None:
    """Replace all linear layers in place, except those that can't be prepacked here.

    Weights without other references are freed layer by layer, so at most one layer is in memory
    twice.
    """

    def is_replaceable(module: torch.nn.Module | None) -> TypeGuard[torch.nn.Linear]:
        return _is_replaceable(module, layer)

    parents = [
        module
        for module in model.modules()
        if type(module) is not torch.nn.Linear and not reads_weights(module)
    ]
    for module in parents:
        merge_siblings(module, layer, is_replaceable)
        for name, child in list(module.named_children()):
            if is_replaceable(child):
                setattr(module, name, layer(child.weight, child.bias))
            elif layer is PrepackedLinear and _is_transposed(child):
                setattr(module, name, layer(child.weight.T, child.bias))


def num_weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all weights; tied ones count once, and a reordered copy as well."""
    plain = sum(p.numel() * p.element_size() for p in model.parameters())
    return plain + num_prepacked_bytes(model)


def num_prepacked_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all reordered weights."""
    return sum(m.num_bytes for m in model.modules() if isinstance(m, PackedLinear))


@torch.inference_mode()
def is_single_row_exact(model: torch.nn.Module) -> bool:
    """Return whether the prepacked layers compute a single row as they compute it among others.

    For a single row of more than 1024 inputs in float32, oneDNN adds in another order. Whether it
    does depends on the number of inputs only, so one layer of each is tried.
    """
    layers = {m.in_features: m for m in model.modules() if isinstance(m, PrepackedLinear)}
    generator = torch.Generator().manual_seed(0)
    for num_inputs, layer in layers.items():
        rows = torch.randn(2, num_inputs, generator=generator).to(layer.dtype)
        if not torch.equal(layer(rows[:1]), layer(rows)[:1]):
            return False
    return True


def leave_file(model: torch.nn.Module) -> None:
    """Give each weight that is left after packing memory of its own.

    safetensors maps a whole file, and the weights of a single norm would keep all of it mapped.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _is_transposed(module: torch.nn.Module) -> TypeGuard[Conv1D]:
    """Return whether a module is GPT-2's kind of linear layer."""
    return type(module) is Conv1D and can_prepack(module.weight.dtype)


def _is_replaceable(
    module: torch.nn.Module | None, layer: type[PackedLinear]
) -> TypeGuard[torch.nn.Linear]:
    return type(module) is torch.nn.Linear and layer.fits(module)
