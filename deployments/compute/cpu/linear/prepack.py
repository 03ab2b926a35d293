"""Puts prepacked layers in the place of a model's linear layers."""

import inspect
from typing import TypeGuard

import torch

from deployments.engine.cpu.int8_linear import Int8Linear
from deployments.engine.cpu.prepacked_linear import PrepackedLinear, can_prepack
from deployments.engine.cpu.shared_input import Layer, SharedInput, SharedInputPart

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names, as transformers' models have them, of layers that read the same rows."""


@torch.no_grad()
def prepack(model: torch.nn.Module, layer: Layer = PrepackedLinear) -> None:
    """Replace all linear layers, in place; what this build of torch can't prepack stays.

    Weights that nothing else holds are freed one layer after the other, so that no more than one
    layer is in memory twice.
    """
    parents = [
        module
        for module in model.modules()
        if type(module) is not torch.nn.Linear and not _reads_weights(module)
    ]
    for module in parents:
        for names in SIBLINGS:
            _join(module, names, layer)
        for name, child in list(module.named_children()):
            if _is_plain(child, layer):
                setattr(module, name, layer(child.weight, child.bias))


def num_weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all weights, tied ones counted once unless one was laid out anew."""
    plain = sum(p.numel() * p.element_size() for p in model.parameters())
    return plain + num_prepacked_bytes(model)


def num_prepacked_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all reordered weights."""
    layers = (PrepackedLinear, Int8Linear)
    return sum(m.num_bytes for m in model.modules() if isinstance(m, layers))


def _join(module: torch.nn.Module, names: tuple[str, ...], layer: Layer) -> None:
    children = dict(module.named_children())
    linears = [child for name in names if _is_plain(child := children.get(name), layer)]
    if len(linears) < len(names) or len({linear.bias is None for linear in linears}) > 1:
        return
    shared = SharedInput(linears, layer)
    for part, name in enumerate(names):
        setattr(module, name, SharedInputPart(shared, part))


def _reads_weights(module: torch.nn.Module) -> bool:
    """Return whether a module's own code asks for weights, as T5's does for their dtype.

    A prepacked layer has none, so what such a module holds stays.
    """
    return "weight" in inspect.unwrap(type(module).forward).__code__.co_names


def _is_plain(module: torch.nn.Module | None, layer: Layer) -> TypeGuard[torch.nn.Linear]:
    return type(module) is torch.nn.Linear and (
        layer is Int8Linear or can_prepack(module.weight.dtype)
    )
