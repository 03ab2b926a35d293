"""Traces a function by torch's symbolic tracer, which takes a second of CPU time.

A start that finds its trace on disk (`kept_trace`) does not import this module.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from deployments.compute.traced_model.traced_graph import NotTraceableError


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
