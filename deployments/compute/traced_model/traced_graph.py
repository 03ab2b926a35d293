"""A model's forward pass, traced once into a flat list of operators.

A stock forward pass goes through hundreds of modules, wrappers and keyword arguments; for a small
model or few rows this takes as long as the arithmetic. The trace is valid for any number of rows.
Its operators run one after another on the same weights, and give the same result to the last bit.
Attention is an input of the trace: a function that knows which rows belong together. `graph_tracer`
makes one, and `kept_trace` keeps it for later starts.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten

FASTER: Mapping[object, Callable[..., Any]] = {
    aten._to_copy.default: torch.Tensor.to,
    aten.add.Tensor: torch.add,
    aten.cat.default: torch.cat,
    aten.mean.dim: torch.mean,
    aten.mul.Tensor: torch.mul,
    aten.neg.default: torch.neg,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.rsqrt.default: torch.rsqrt,
    aten.silu.default: torch.nn.functional.silu,
    aten.split_with_sizes.default: torch.split_with_sizes,
    aten.sym_size.int: torch.Tensor.size,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
}
"""Other bindings of the same operators, which reach the kernel in a third of the time."""


class NotTraceableError(ValueError):
    """The model's forward pass can't be traced; the message says why."""


@torch.library.custom_op("raystream::attend", mutates_args=())
def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int) -> torch.Tensor:
    """Stand in for a call of attention while a model is traced.

    Args:
        query: [1, num_heads, n, head_dim].
        key: [1, num_kv_heads, n, head_dim].
        value: [1, num_kv_heads, n, head_dim].
        call: The call's number.

    Returns:
        [1, n, num_heads, head_dim].
    """
    raise AssertionError("attention is an input of a traced graph")


@attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int) -> torch.Tensor:
    _, num_heads, num_rows, _ = query.shape
    return query.new_empty(1, num_rows, num_heads, value.shape[-1])


def simplify(graph: torch.fx.GraphModule) -> None:
    """Make attention one more input, and call the operators by their fastest bindings."""
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.raystream.attend.default)
    last_input = graph.graph.find_nodes(op="placeholder")[-1]
    with graph.graph.inserting_after(last_input):
        attend = graph.graph.placeholder("attend")
    for node in nodes:
        node.target, node.args = call_attention, (attend, *node.args)
    for node in graph.graph.nodes:
        if node.target is aten._to_copy.default and not _is_cast(node):
            continue
        node.target = FASTER.get(node.target, node.target)
    graph.recompile()


def call_attention(function: Callable[..., torch.Tensor], *arguments: object) -> torch.Tensor:
    """Call the attention that is an input of a graph."""
    return function(*arguments)


def _is_cast(node: torch.fx.Node) -> bool:
    """Return whether a copy changes the dtype and nothing else."""
    (source,) = node.all_input_nodes
    return node.kwargs.keys() == {"dtype"} and source.meta["val"].dtype != node.kwargs["dtype"]
