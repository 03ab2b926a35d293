"""A model's forward pass, traced once into a flat list of operators.

A stock forward pass goes through hundreds of modules, wrappers and keyword arguments; for a small
model or few rows this takes as long as the arithmetic. The trace is valid for any number of rows.
Its operators run one after another on the same weights, and give the same result to the last bit.
Attention is an input of the trace: a function that knows which rows belong together.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

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


def trace_graph(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> torch.fx.GraphModule:
    """Trace a function symbolically; nothing is computed.

    Args:
        function: Calls `attend` where the model attends.
        inputs: Examples. Each different size becomes a symbol for any number, so it must be neither
            0 nor 1.

    Raises:
        NotTraceableError: The control flow depends on values, or on the number of rows.
    """
    tracer = make_fx(
        function,
        tracing_mode="symbolic",
        _allow_non_fake_inputs=True,  # the weights
    )
    # Without this, fake_tensor logs a traceback for each failure that becomes NotTraceableError.
    fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")
    fake_tensors.disabled = True
    try:
        with torch.inference_mode(mode=False), torch.no_grad(), locating_cheaply():
            graph: torch.fx.GraphModule = tracer(*inputs)
    except Exception as error:  # a foreign model may raise anything
        raise NotTraceableError(f"{type(error).__name__}: {error}") from error
    finally:
        fake_tensors.disabled = False
    _refuse_guards(graph)
    _refuse_values(graph)
    return graph


@contextmanager
def locating_cheaply() -> Iterator[None]:
    """Let the trace find the model's own lines without torch's compilers meanwhile.

    For each symbol, torch looks for the line that made it, to name it in messages. To know its own
    files, which it passes over, it imports 400 modules that trace nothing: `torch.export`, parts of
    Inductor, and networkx. They would take 17 MiB until the process ends.
    """
    files = {
        vars(module).get("__file__")
        for name, module in sys.modules.copy().items()
        if name.partition(".")[0] == "torch"
    }
    with patch.object(symbolic_shapes, "uninteresting_files", lambda: files, create=True):
        yield


def _refuse_guards(graph: torch.fx.GraphModule) -> None:
    """Refuse a trace that holds only for some numbers of rows.

    Raises:
        NotTraceableError: The trace has conditions on that number; the message lists them.
    """
    placeholder = next(node for node in graph.graph.nodes if node.op == "placeholder")
    guards = placeholder.meta["val"].fake_mode.shape_env.guards
    if guards:
        conditions = ", ".join(str(guard.expr) for guard in guards)
        raise NotTraceableError(f"it depends on the number of rows: {conditions}")


def _refuse_values(graph: torch.fx.GraphModule) -> None:
    """Refuse a trace in which a tensor's shape depends on values.

    Raises:
        NotTraceableError: A shape depends on values; the message names the first such tensor.
    """
    for node in graph.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor) and free_unbacked_symbols(value):
            raise NotTraceableError(f"the shape of {node.name} depends on values")


def simplify(graph: torch.fx.GraphModule) -> None:
    """Make attention one more input, and call the operators by their fastest bindings."""
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.raystream.attend.default)
    last_input = graph.graph.find_nodes(op="placeholder")[-1]
    with graph.graph.inserting_after(last_input):
        attend = graph.graph.placeholder("attend")
    for node in nodes:
        node.target, node.args = _call, (attend, *node.args)
    for node in graph.graph.nodes:
        if node.target is aten._to_copy.default and not _is_cast(node):
            continue
        node.target = FASTER.get(node.target, node.target)
    graph.recompile()


def _call(function: Callable[..., torch.Tensor], *arguments: object) -> torch.Tensor:
    return function(*arguments)


def _is_cast(node: torch.fx.Node) -> bool:
    """Return whether a copy changes the dtype and nothing else."""
    (source,) = node.all_input_nodes
    return node.kwargs.keys() == {"dtype"} and source.meta["val"].dtype != node.kwargs["dtype"]
