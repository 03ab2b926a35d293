"""Compares the programs that two starts of a model run."""

from typing import Any

import torch


def assert_same_program(graph: torch.fx.GraphModule, other: torch.fx.GraphModule) -> None:
    """Require that two graphs do the same node by node, and that each one's code does that."""
    assert _nodes(graph) == _nodes(other)
    for each in (graph, other):
        assert each.code == torch.fx.GraphModule(each, each.graph).code
    assert graph.code == other.code


def _nodes(graph: torch.fx.GraphModule) -> list[tuple[Any, ...]]:
    nodes = graph.graph.nodes
    return [(n.op, n.name, n.target, str(n.args), str(n.kwargs)) for n in nodes]
