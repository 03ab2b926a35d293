"""Merges linear layers that read the same rows into one product.

Queries, keys and values are three products of one input; the gate and up projections of an MLP are
two. One product over the joined weights costs less than several: fewer calls, and fewer waits of
the compute threads for each other.

The model still calls its layers one by one. The first call with an input computes all outputs, and
the other layers take theirs if they get the very same tensor. Pending outputs are kept per thread,
so several threads may run one model.
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read the same rows, as in transformers' models."""

MakeLayer = Callable[[torch.Tensor, torch.Tensor | None], torch.nn.Module]
"""Makes a layer of weights [out_features, in_features] and biases [out_features]."""


class _PendingOutputs(threading.local):
    """Outputs that a thread has computed and not taken yet."""

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.outputs: dict[int, torch.Tensor] = {}


class MergedLinear(torch.nn.Module):
    """Several linear layers of one input, as one."""

    def __init__(self, linears: Sequence[torch.nn.Linear], make_layer: MakeLayer) -> None:
        """Join the weights.

        Args:
            linears: Layers of one input size; either all have a bias or none does.
            make_layer: Makes the layer that holds the joined weights.
        """
        super().__init__()
        weights: list[torch.Tensor] = [linear.weight for linear in linears]
        biases: list[torch.Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        self._joined = make_layer(torch.cat(weights), torch.cat(biases) if biases else None)
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


def merge_siblings(
    module: torch.nn.Module,
    make_layer: MakeLayer,
    is_replaceable: Callable[[torch.nn.Module | None], TypeGuard[torch.nn.Linear]],
) -> None:
    """Merge the layers of a module that read the same rows, in place.

    Args:
        module: An attention, or an MLP.
        make_layer: Makes the layer that holds the joined weights.
        is_replaceable: Whether a layer may be merged.
    """
    children = dict(module.named_children())
    for names in SIBLINGS:
        linears = [child for name in names if is_replaceable(child := children.get(name))]
        if len(linears) < len(names) or len({linear.bias is None for linear in linears}) > 1:
            continue
        merged = MergedLinear(linears, make_layer)
        for part, name in enumerate(names):
            setattr(module, name, MergedLinearPart(merged, part))


@torch.no_grad()
def merge_plainly(model: torch.nn.Module) -> None:
    """Merge all layers of a model that read the same rows into layers of torch, in place.

    Weights without other references are freed layer by layer, so at most one layer is in memory
    twice.
    """
    # No list of all modules: it would keep the replaced ones and their weights.
    parents = [m for m in model.modules() if not _is_plain(m) and not reads_weights(m)]
    for module in parents:
        merge_siblings(module, _plain, _is_plain)


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    out_features, in_features = weight.shape
    linear = torch.nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return linear


def _is_plain(module: torch.nn.Module | None) -> TypeGuard[torch.nn.Linear]:
    return type(module) is torch.nn.Linear


def reads_weights(module: torch.nn.Module) -> bool:
    """Return whether a module's own code reads weights of its layers, as T5 reads their dtype.

    A merged or prepacked layer has no `weight`, so the layers of such a module are not replaced.
    """
    return "weight" in inspect.unwrap(type(module).forward).__code__.co_names
