"""A traced graph as JSON, and back: operators by name, weights by their place in the model.

What is read is a graph of operators that this module knows, on the tensors of a model that is in
memory, so a file can bring neither code nor weights. Values that JSON has are written as they are;
each other one is an object with one key, which says what it is.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Final

import torch

from deployments.compute.fusion.fuse import GELU_TABLE, gelu_table
from deployments.compute.fusion.fused_operators import FusedOperators
from deployments.compute.traced_model.traced_graph import FASTER, call_attention

NAMESPACES: Final = ("aten", "mkldnn", "raystream")
"""Those of the operators that a graph may call."""

FUNCTIONS: Final = (
    *(operator.getitem, operator.add, operator.sub, operator.mul, operator.neg),
    *(operator.floordiv, operator.mod, call_attention),
)
"""Functions that a graph may call besides operators: on numbers of rows, on tuples, and ours."""

TORCH: Final = (torch.dtype, torch.layout, torch.memory_format)
"""Types whose values are attributes of torch."""


class UnwritableGraphError(ValueError):
    """A graph has a part that can't be written; the message names it."""


class UnreadableGraphError(ValueError):
    """A text is no graph on the model's tensors; the message says why."""


class GraphText:
    """Writes graphs of one model as values of JSON, and reads them."""

    def __init__(self, model: torch.nn.Module, ops: FusedOperators) -> None:
        """Know the model and the operators.

        Args:
            model: Its modules hold the tensors of the graphs.
            ops: The fused operators that the graphs may call.
        """
        self._ops = ops
        self._tensors = dict(_tensors(model))
        self._places: dict[int, str] = {}
        for place, tensor in self._tensors.items():
            self._places.setdefault(id(tensor), place)
        fused = {field.name: getattr(ops, field.name) for field in fields(ops)}
        self._functions: dict[str, Callable[..., Any]] = {
            **{f"python {each.__name__}": each for each in FUNCTIONS},
            **{f"faster {name}": each for name, each in FASTER.items()},
            **{f"fused {name}": each for name, each in fused.items() if callable(each)},
        }
        self._names = {function: name for name, function in self._functions.items()}

    @property
    def shared(self) -> list[tuple[str, str]]:
        """Places that hold a tensor of another place, and that place."""
        found = ((place, self._places[id(tensor)]) for place, tensor in self._tensors.items())
        return [(place, first) for place, first in found if place != first]

    def write(self, graph: torch.fx.GraphModule) -> dict[str, Any]:
        """Return a graph as values of JSON.

        Raises:
            UnwritableGraphError: It has a part that is neither known nor the model's.
        """
        places = {
            node.target: self._place_of(getattr(graph, node.target))
            for node in graph.graph.find_nodes(op="get_attr")
            if node.target != GELU_TABLE
        }
        return {"tensors": places, "nodes": [self._write_node(node) for node in graph.graph.nodes]}

    def _place_of(self, tensor: torch.Tensor) -> str:
        if (place := self._places.get(id(tensor))) is None:
            raise UnwritableGraphError(f"a tensor {[*tensor.shape]} that the model does not hold")
        return place

    def _write_node(self, node: torch.fx.Node) -> list[Any]:
        target = self._name_of(node.target) if node.op == "call_function" else node.target
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            raise UnwritableGraphError(f"a node that is a {node.op}")
        kwargs = {name: self.write_value(each) for name, each in node.kwargs.items()}
        return [node.op, node.name, target, self.write_value([*node.args]), kwargs]

    def _name_of(self, function: Any) -> str:
        if (name := self._names.get(function)) is not None:
            return name
        if isinstance(function, torch._ops.OpOverload) and function.namespace in NAMESPACES:
            return f"torch {function}"
        raise UnwritableGraphError(f"a call of {function}")

    def write_value(self, value: Any) -> Any:
        """Return an argument as a value of JSON.

        Raises:
            UnwritableGraphError: Its type is not known, or it is a tensor that is not the model's.
        """
        match value:
            case torch.fx.Node():
                return {"node": value.name}
            case torch.Tensor():
                return {"tensor": self._place_of(value)}
            case list():
                return [self.write_value(each) for each in value]
            case tuple():
                return {"tuple": [self.write_value(each) for each in value]}
            case torch.device():
                return {"device": str(value)}
        if isinstance(value, TORCH):
            return {"torch": str(value).removeprefix("torch.")}
        if type(value) in (bool, int, float, str, type(None)):
            return value
        raise UnwritableGraphError(f"a {type(value).__name__} as an argument")

    def read(self, text: Mapping[str, Any]) -> torch.fx.GraphModule:
        """Return the graph that `write` wrote, on the model's tensors.

        Raises:
            UnreadableGraphError: An operator, a tensor or a kind of value is not known.
        """
        graph, nodes = torch.fx.Graph(), dict[str, torch.fx.Node]()
        for op, name, target, args, kwargs in text["nodes"]:
            called = self._function_of(target) if op == "call_function" else target
            given = {key: self.read_value(each, nodes) for key, each in kwargs.items()}
            values = tuple(self.read_value(args, nodes))
            nodes[name] = graph.create_node(op, called, values, given, name=name)
        root = {target: self._tensor_at(place) for target, place in text["tensors"].items()}
        if graph.find_nodes(op="get_attr", target=GELU_TABLE):
            root[GELU_TABLE] = gelu_table(self._ops)
        return torch.fx.GraphModule(root, graph)

    def _function_of(self, name: str) -> Callable[..., Any]:
        if (known := self._functions.get(name)) is not None:
            return known
        kind, _, path = name.partition(" ")
        namespace, *names = path.split(".")
        found: Any = getattr(torch.ops, namespace) if namespace in NAMESPACES else None
        for each in names:
            found = getattr(found, each, None)
        if kind == "torch" and isinstance(found, torch._ops.OpOverload):
            return found
        raise UnreadableGraphError(f"no operator is called {name}")

    def _tensor_at(self, place: str) -> torch.Tensor:
        if (tensor := self._tensors.get(place)) is None:
            raise UnreadableGraphError(f"the model has no tensor {place}")
        return tensor

    def read_value(self, value: Any, nodes: Mapping[str, torch.fx.Node]) -> Any:
        """Return the argument that `write_value` wrote.

        Args:
            value: A value of JSON.
            nodes: The nodes that it may name.

        Raises:
            UnreadableGraphError: A tensor or a kind of value is not known.
        """
        match value:
            case list():
                return [self.read_value(each, nodes) for each in value]
            case {"tuple": held}:
                return tuple(self.read_value(held, nodes))
            case {"node": name}:
                return nodes[name]
            case {"tensor": place}:
                return self._tensor_at(place)
            case {"device": name}:
                return torch.device(name)
            case {"torch": name} if isinstance(found := getattr(torch, name, None), TORCH):
                return found
            case dict():
                raise UnreadableGraphError(f"a value is {value}")
        return value


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of a model's modules with its place: the module's path, and its name."""
    for path, module in model.named_modules():
        held = {**vars(module), **module._parameters, **module._buffers}
        for name, value in held.items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value
