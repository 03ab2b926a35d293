"""Captures what a traced graph's kernels compute, to run it as programs without Python.

A graph is split at its first kernel. What comes before it runs in torch. After it only kernels and
views are allowed: their calls are captured for a number of rows, with memory of their own, and run
as a whole later, on the same memory.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deployments.compute.cpu.fusion import ops
from deployments.compute.cpu.jit.kernel_program import EPOCH, KernelProgram, can_run
from deployments.compute.cpu.jit.launch import KernelCall, captured_by

logger = logging.getLogger(__name__)

aten = torch.ops.aten

ALLOCATIONS = (aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default)


class NotProgrammableError(ValueError):
    """A graph computes with more than kernels and views; the message says with what."""


def open_programs(graph: torch.fx.GraphModule, max_rows: int) -> "GraphPrograms | None":
    """Return a graph's programs; None, and the reason in the log, if it can have none.

    Args:
        graph: Takes token ids, positions, the rows that are due, and attention; calls kernels by
            `launch`.
        max_rows: The most rows of a program.
    """
    try:
        return GraphPrograms(graph, max_rows) if can_run() else None
    except NotProgrammableError as error:
        logger.info("decode steps run call by call: %s", error)
        return None


class GraphPrograms:
    """Captures programs of a graph; they share memory, so one thread at a time may use them."""

    def __init__(self, graph: torch.fx.GraphModule, max_rows: int) -> None:
        """Split the graph; see `open_programs`.

        Raises:
            NotProgrammableError: The graph can't be split at its first kernel.
        """
        self._first, self._rest = _split_at_kernels(graph)
        self._memory = _BufferPool(max_rows)

    def begin(self, token_ids: Sequence[int], positions: Sequence[int]) -> Sequence[Any]:
        """Run what comes before the first kernel, for rows that are all due."""
        rows = torch.tensor([token_ids, positions])
        found: Sequence[Any] = self._first(rows[:1], rows[1:], torch.arange(len(token_ids)))
        return found

    def capture(
        self, inputs: Sequence[Any], attend: Callable[..., torch.Tensor], num_rows: int
    ) -> "GraphProgram":
        """Capture the rest of the graph for `num_rows` rows.

        Args:
            inputs: What `begin` has returned.
            attend: The attention of these rows.
            num_rows: The number of rows.

        Raises:
            NotProgrammableError: It also computes with torch's own operators.
        """
        held = tuple(map(_writable, inputs))
        calls = _CapturedCalls(self._memory, num_rows)
        try:
            with captured_by(calls), _KernelsOnly():  # type: ignore[no-untyped-call] # see below
                logits = _CapturingInterpreter(self._rest, calls).run(*held, attend)
        finally:
            calls.end()
        return GraphProgram(KernelProgram(calls.made), held, logits)

    def drop(self) -> None:
        """Drop the memory of all programs, which must not run again."""
        self._memory.clear()


class GraphProgram:
    """Runs the rest of a graph for a fixed number of rows."""

    def __init__(
        self, program: KernelProgram, inputs: tuple[Any, ...], logits: torch.Tensor
    ) -> None:
        """Keep the memory that the program reads and writes."""
        self._program, self._inputs, self._logits = program, inputs, logits

    def run(self, inputs: Sequence[Any]) -> torch.Tensor:
        """Run on what `GraphPrograms.begin` has returned; the next run overwrites the logits."""
        for held, new in zip(self._inputs, inputs, strict=True):
            # An input at the same address in two steps is a view of the weights.
            if isinstance(held, torch.Tensor) and held.data_ptr() != new.data_ptr():
                held.copy_(new)
        self._program.run(torch.get_num_threads())
        return self._logits


def _writable(value: object) -> object:
    """Return a tensor whose elements share no memory; return other values unchanged.

    A tensor without shared elements is not copied: it may be a view of the weights.
    """
    return value.clone() if isinstance(value, torch.Tensor) and 0 in value.stride() else value


class _BufferPool:
    """Reusable buffers, each large enough for the most rows, by the bytes of a row."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, row_bytes: int) -> torch.Tensor:
        free = self._free.setdefault(row_bytes, [])
        return free.pop() if free else torch.empty(row_bytes * self._max_rows, dtype=torch.uint8)

    def give_back(self, row_bytes: int, buffer: torch.Tensor) -> None:
        self._free[row_bytes].append(buffer)

    def clear(self) -> None:
        self._free.clear()


class _CapturedCalls:
    """Keeps the calls that are captured, and lends buffers while a value uses them.

    A buffer that comes back is lent again only in the next epoch: see `kernel_program`.
    """

    def __init__(self, memory: _BufferPool, num_rows: int) -> None:
        self.made: list[KernelCall] = []
        self._memory = memory
        self._num_rows = num_rows
        self._lent: dict[int, tuple[int, torch.Tensor]] = {}
        self._resting: list[tuple[int, torch.Tensor]] = []

    def capture(self, call: KernelCall) -> None:
        self.made.append(call)
        if len(self.made) % EPOCH == 0:
            self._release_resting()

    def empty(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        num_elements = torch.Size(shape).numel()
        row_bytes, remainder = divmod(num_elements * dtype.itemsize, self._num_rows)
        if remainder:
            raise NotProgrammableError("an output that is not made of rows")
        buffer = self._memory.take(row_bytes)
        self._lent[buffer.untyped_storage().data_ptr()] = row_bytes, buffer
        elements = buffer[: row_bytes * self._num_rows].view(dtype)
        return elements.as_strided(shape, strides)

    def give_back(self, values: Iterable[object]) -> None:
        """Take back all buffers except those that hold these values."""
        used = {t.untyped_storage().data_ptr() for t in values if _has_storage(t)}
        self._resting += [self._lent.pop(address) for address in self._lent.keys() - used]

    def end(self) -> None:
        """Take back all buffers."""
        self.give_back(())
        self._release_resting()

    def _release_resting(self) -> None:
        for buffer in self._resting:
            self._memory.give_back(*buffer)
        self._resting.clear()


def _has_storage(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether the value is a tensor that oneDNN has not packed."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


class _CapturingInterpreter(torch.fx.Interpreter):
    """Runs a graph whose kernels are captured; takes buffers back after a value's last use."""

    def __init__(self, graph: torch.fx.GraphModule, calls: _CapturedCalls) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # it would end up in the message of every refusal
        self._calls = calls

    def run_node(self, n: torch.fx.Node) -> Any:
        parts = (v if isinstance(v, tuple | list) else (v,) for v in self.env.values())
        self._calls.give_back(chain.from_iterable(parts))
        return super().run_node(n)


class _KernelsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Refuses torch operators that compute; views and allocations are allowed."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Some operators, such as `contiguous`, compute only sometimes: the operators that they call
        # show whether they do.
        with self:
            found = func.decompose(*args, **(kwargs or {}))
        if found is not NotImplemented:
            return found
        is_view = all(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and func not in ALLOCATIONS:
            raise NotProgrammableError(f"{func} between kernels")
        return func(*args, **(kwargs or {}))


def _split_at_kernels(
    graph: torch.fx.GraphModule,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Split a graph into the part that runs before the first kernel, and the rest.

    Returns:
        A graph from token ids, positions and the rows that are due to a tuple; and a graph from the
        tuple's elements and attention to the logits of all rows.

    Raises:
        NotProgrammableError: The graph can't be split this way.
    """
    token_ids, positions, due, attend = graph.graph.find_nodes(op="placeholder")
    after = _after_kernels(graph.graph, attend)
    edge = [
        node
        for node in graph.graph.nodes
        if node not in after
        and node.op not in ("get_attr", "placeholder")
        and any(user in after for user in node.users)
    ]
    first, rest = torch.fx.Graph(), torch.fx.Graph()
    copies = {node: first.placeholder(node.name) for node in (token_ids, positions, due)}
    moved = {node: rest.placeholder(node.name) for node in (*edge, attend)}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            copies[node], moved[node] = (g.node_copy(node) for g in (first, rest))
        elif node in after:
            moved[node] = _moved(node, rest, moved, due)
        elif node.op != "placeholder":
            copies[node] = _copied(node, first, copies)
    first.output(tuple(copies[node] for node in edge))
    parts = torch.fx.GraphModule(graph, first), torch.fx.GraphModule(graph, rest)
    for part in parts:
        part.graph.eliminate_dead_code()
        part.recompile()
    return parts


def _moved(
    node: torch.fx.Node,
    rest: torch.fx.Graph,
    moved: dict[torch.fx.Node, torch.fx.Node],
    due: torch.fx.Node,
) -> torch.fx.Node:
    if node.target is aten.index.Tensor and node.args[1] == [None, due]:
        (rows, _) = node.args
        assert isinstance(rows, torch.fx.Node)
        return moved[rows]
    return _copied(node, rest, moved)


def _copied(
    node: torch.fx.Node, graph: torch.fx.Graph, copies: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    missing = [source.name for source in node.all_input_nodes if source not in copies]
    if missing:
        raise NotProgrammableError(
            f"{node.name} needs {', '.join(missing)} from before the first kernel"
        )
    return graph.node_copy(node, copies.__getitem__)


def _after_kernels(graph: torch.fx.Graph, attend: torch.fx.Node) -> set[torch.fx.Node]:
    """Return the kernels and everything that depends on their results."""
    after = {attend}
    for node in graph.nodes:
        if _is_kernel(node) or any(source in after for source in node.all_input_nodes):
            after.add(node)
    return after - {attend}


def _is_kernel(node: torch.fx.Node) -> bool:
    module = getattr(node.target, "__module__", None)
    return node.op == "call_module" or module == ops.__name__
