"""Puts prepacked layers in the place of a model's linear layers."""

from typing import TypeGuard

import torch

from deployments.engine.cpu.prepacked_linear import PrepackedLinear, can_prepack
from deployments.engine.cpu.shared_input import SharedInput, SharedInputPart

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names, as transformers' models have them, of layers that read the same rows."""


@torch.no_grad()
def prepack(model: torch.nn.Module) -> None:
    """Replace all linear layers, in place; what this build of torch can't prepack stays.

    Weights that nothing else holds are freed one layer after the other, so that no more than one
    layer is in memory twice.
    """
    for module in list(model.modules()):
        for names in SIBLINGS:
            _join(module, names)
        for name, child in list(module.named_children()):
            if _is_plain(child):
                setattr(module, name, PrepackedLinear(child.weight, child.bias))


def num_prepacked_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all reordered weights."""
    return sum(m.num_bytes for m in model.modules() if isinstance(m, PrepackedLinear))


def _join(module: torch.nn.Module, names: tuple[str, ...]) -> None:
    children = dict(module.named_children())
    linears = [child for name in names if _is_plain(child := children.get(name))]
    if len(linears) < len(names) or len({linear.bias is None for linear in linears}) > 1:
        return
    shared = SharedInput(linears)
    for part, name in enumerate(names):
        setattr(module, name, SharedInputPart(shared, part))


def _is_plain(module: torch.nn.Module | None) -> TypeGuard[torch.nn.Linear]:
    return type(module) is torch.nn.Linear and can_prepack(module.weight.dtype)
