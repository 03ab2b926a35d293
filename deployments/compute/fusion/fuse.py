"""Replaces chains of small operators in a traced graph by calls of fused ones.

A decode step of a small model runs hundreds of operators, each of which computes for less than a
microsecond and costs several. Chains are found by what they compute, in any model: RMS norms, with
or without a residual addition before them, rotary positions and gated activations.

Other operators, and chains of another dtype or layout, are not changed.
"""

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch

from deployments.compute.fusion.fused_operators import FusedOperators
from deployments.compute.fusion.patterns import Operator

aten = torch.ops.aten

DTYPES = (torch.bfloat16, torch.float32)

GELU_TABLE = "gelu_table"
"""The name of the GELU table among a graph's weights."""

END = 2**63 - 1
"""The end of a slice without an end, as torch traces it."""


def fuse(graph: torch.fx.GraphModule, ops: FusedOperators) -> torch.fx.GraphModule | None:
    """Return a copy with chains replaced, on the same weights; None if there are none.

    Args:
        graph: A model on the operators' device, traced by `make_fx`.
        ops: The fused operators.
    """
    if any(_writes(node) for node in graph.graph.nodes):
        return None  # a write could change a chain's input between its operators
    fused = torch.fx.GraphModule(graph, _copy(graph.graph))
    _drop_copies(fused.graph)
    rules = (_fuse_norm, _fuse_rotation, _fuse_silu, _fuse_gelu)
    # Go from the end, since a norm with casts around it contains a norm without casts.
    nodes = reversed(list(fused.graph.nodes))
    count = sum(any(rule(fused, ops, node) for rule in rules) for node in nodes)
    for node in list(fused.graph.nodes):
        _fuse_addition(fused, ops, node)
    if not count:
        return None
    fused.graph.eliminate_dead_code()
    _pair_rotations(fused.graph, ops)
    fused.recompile()
    return fused


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _drop_copies(graph: torch.fx.Graph) -> None:
    """Bypass operators that copy a tensor, or join it with an empty one."""
    for node in graph.nodes:
        source = None
        if node.target in (aten.clone.default, aten.alias.default) and not node.kwargs:
            source = node.args[0]
        elif node.target is aten.cat.default:
            filled = [part for part in node.args[0] if 0 not in _value(part).shape]
            source = filled[0] if len(filled) == 1 else None
        if isinstance(source, torch.fx.Node) and _shape(source) == _shape(node):
            node.replace_all_uses_with(source)


def _copy(graph: torch.fx.Graph) -> torch.fx.Graph:
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _cast(pattern: Any, dtype: torch.dtype) -> Operator:
    return Operator(aten._to_copy.default, (pattern,), {"dtype": dtype})


def _normalized(rows: Any) -> Operator:
    square = Operator(aten.pow.Tensor_Scalar, (rows, 2))
    mean = Operator(aten.mean.dim, (square, [-1], True))
    root = Operator(aten.rsqrt.default, (Operator(aten.add.Tensor, (mean, "epsilon")),))
    return Operator(aten.mul.Tensor, (rows, root))


def _times(one: Any, other: Any) -> Operator:
    return Operator(aten.mul.Tensor, (one, other))


def _plus_one(weight: Any) -> Operator:
    return Operator(aten.add.Tensor, (weight, 1.0))


WIDE = _cast("rows", torch.float32)

NORMS = (
    # A pattern, and whether it multiplies rows by 1 + weight.
    (_times("weight", _cast(_normalized(WIDE), torch.bfloat16)), False),
    (
        _cast(_times(_normalized(WIDE), _plus_one(_cast("weight", torch.float32))), torch.bfloat16),
        True,
    ),
    (_times(_normalized("rows"), _plus_one("weight")), True),
    (_times("weight", _normalized("rows")), False),
)

_LOW = Operator(aten.slice.Tensor, ("heads", 3, 0, "half"))
_HIGH = Operator(aten.slice.Tensor, ("heads", 3, "half", END))
_COSINES = Operator(aten.unsqueeze.default, ("cosines", 1))
_SINES = Operator(aten.unsqueeze.default, ("sines", 1))
ROTATION = Operator(
    aten.add.Tensor,
    (
        _times("heads", _COSINES),
        _times(
            Operator(aten.cat.default, ([Operator(aten.neg.default, (_HIGH,)), _LOW], -1)), _SINES
        ),
    ),
)


def _gated(activation: Operator) -> Operator:
    return _times(activation, Operator(getitem, ("parts", 1)))


_GATE = Operator(getitem, ("parts", 0))
SILU_MUL = _gated(Operator(aten.silu.default, (_GATE,)))
GELU_MUL = _gated(Operator(aten.gelu.default, (_GATE,), {"approximate": "tanh"}))
HALVES = (
    Operator(aten.split_with_sizes.default, ("joined", ["width", "width"], -1)),
    Operator(aten.split.Tensor, ("joined", "width", -1)),
)


def _fuse_norm(graph: torch.fx.GraphModule, ops: FusedOperators, node: torch.fx.Node) -> bool:
    for pattern, is_shifted in NORMS:
        found = pattern.match(node)
        if found is None or not isinstance(found["epsilon"], float):
            continue
        rows, weight = found["rows"], found["weight"]
        width = _value(node).shape[-1]
        if (
            _are_alike(ops, rows, weight, node)
            and _value(rows).dim() in (3, 4)
            and _value(rows).shape[0] == 1
            and isinstance(width, int)
            and width < ops.max_width
            and _value(weight).shape == (width,)
            and _value(weight).is_contiguous()
        ):
            arguments = (rows, weight, found["epsilon"], is_shifted)
            _replace(graph, node, ops.rms_norm, arguments)
            return True
    return False


def _fuse_addition(graph: torch.fx.GraphModule, ops: FusedOperators, node: torch.fx.Node) -> bool:
    """Fuse a norm with the addition before it, and keep the sum for its other readers."""
    if node.target is not ops.rms_norm:
        return False
    total, weight, *others = node.args
    assert isinstance(total, torch.fx.Node)
    assert isinstance(weight, torch.fx.Node)
    found = Operator(aten.add.Tensor, ("one", "other")).match(total)
    if found is None or weight.op != "get_attr" or not _are_alike(ops, total, *found.values()):
        return False
    if _value(total).dim() != 3 or len({_shape(n) for n in (total, *found.values())}) > 1:
        return False
    # The call replaces the addition, since other nodes may read the sum before the norm.
    with graph.graph.inserting_before(total):
        early_weight = graph.graph.node_copy(weight)
        arguments = (found["one"], found["other"], early_weight, *others)
        pair = graph.graph.call_function(ops.add_rms_norm, arguments)
        for index, part in enumerate((total, node)):
            item = graph.graph.call_function(getitem, (pair, index))
            item.meta = dict(part.meta)
            part.replace_all_uses_with(item)
    graph.graph.erase_node(node)
    graph.graph.erase_node(total)
    return True


def _fuse_rotation(graph: torch.fx.GraphModule, ops: FusedOperators, node: torch.fx.Node) -> bool:
    found = ROTATION.match(node)
    if found is None:
        return False
    heads, tables = found["heads"], (found["cosines"], found["sines"])
    if not _are_alike(ops, node, heads, *tables) or _value(heads).dim() != 4:
        return False
    batch, _, num_rows, head_dim = _shape(heads)
    if batch != "1" or head_dim != str(2 * found["half"]):
        return False
    if any(_shape(table) != (batch, num_rows, head_dim) for table in tables):
        return False
    _replace(graph, node, ops.rotate, (heads, *tables))
    return True


def _pair_rotations(graph: torch.fx.Graph, ops: FusedOperators) -> None:
    """Fuse rotations by the same tables, as those of a layer's queries and keys, two by two."""
    if ops.rotate_pair is None:
        return
    first: torch.fx.Node | None = None
    for node in list(graph.nodes):
        if first is not None and first in node.all_input_nodes:
            first = None  # it is read before another could be rotated with it
        if node.target is not ops.rotate:
            continue
        if first is None or first.args[1:] != node.args[1:]:
            first = node
            continue
        with graph.inserting_before(node):
            pair = graph.call_function(ops.rotate_pair, (first.args[0], *node.args))
            for index, part in enumerate((first, node)):
                item = graph.call_function(getitem, (pair, index))
                item.meta = dict(part.meta)
                part.replace_all_uses_with(item)
        graph.erase_node(first)
        graph.erase_node(node)
        first = None


def _fuse_silu(graph: torch.fx.GraphModule, ops: FusedOperators, node: torch.fx.Node) -> bool:
    joined = _joined(ops, SILU_MUL, node)
    if joined is None:
        return False
    _replace(graph, node, ops.silu_mul, (joined,))
    return True


def _fuse_gelu(graph: torch.fx.GraphModule, ops: FusedOperators, node: torch.fx.Node) -> bool:
    joined = _joined(ops, GELU_MUL, node)
    if joined is None:
        return False
    if ops.table_mul is None or ops.all_bfloat16 is None or _value(node).dtype is torch.float32:
        _replace(graph, node, ops.gelu_mul, (joined,))
        return True
    if not hasattr(graph, GELU_TABLE):
        graph.register_buffer(GELU_TABLE, gelu_table(ops))
    with graph.graph.inserting_before(node):
        table_node = graph.graph.get_attr(GELU_TABLE)
    _replace(graph, node, ops.table_mul, (table_node, joined))
    return True


def gelu_table(ops: FusedOperators) -> torch.Tensor:
    """Return GELU of all bfloat16, for operators that look it up."""
    assert ops.all_bfloat16 is not None
    return torch.nn.functional.gelu(ops.all_bfloat16(), approximate="tanh")


def _joined(ops: FusedOperators, pattern: Operator, node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the tensor whose halves are the gate and the factor, or None."""
    found = pattern.match(node)
    if found is None:
        return None
    for halves in HALVES:
        split = halves.match(found["parts"])
        if split is None:
            continue
        joined = split["joined"]
        assert isinstance(joined, torch.fx.Node)
        *outer, both = _shape(joined)
        is_halved = outer[0] == "1" and len(outer) == 2 and both == str(2 * split["width"])
        return joined if is_halved and _are_alike(ops, node, joined) else None
    return None


def _replace(
    graph: torch.fx.GraphModule,
    node: torch.fx.Node,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    with graph.graph.inserting_before(node):
        call = graph.graph.call_function(function, arguments)
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    graph.graph.erase_node(node)


def _are_alike(ops: FusedOperators, *nodes: object) -> bool:
    """Return whether all are the device's tensors of one dtype that the operators take."""
    values = [node.meta.get("val") for node in nodes if isinstance(node, torch.fx.Node)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return (
        len(tensors) == len(nodes)
        and all(tensor.device.type == ops.device_type for tensor in tensors)
        and len({tensor.dtype for tensor in tensors}) == 1
        and tensors[0].dtype in DTYPES
    )


def _value(node: torch.fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def _shape(node: torch.fx.Node) -> tuple[str, ...]:
    """Return the sizes as text, since comparing symbolic sizes would specialise the graph."""
    return tuple(map(str, _value(node).shape))
