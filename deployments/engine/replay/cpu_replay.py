"""Decode steps of a traced forward pass as programs of CPU kernels.

A decode step makes hundreds of calls. Many take microseconds, and Python runs between them. But
every step of n rows calls the same kernels on the same memory; only its input rows and how far each
row sees differ. So the calls of the first step of n rows are captured, with separate memory, and
later steps replay them as a whole, without Python.

Everything before the first kernel (the embedding, the tables of rotary positions) runs in torch in
every step. After that only kernels and views are allowed. A model with anything else runs its steps
call by call.
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
from deployments.engine.attention.kv_cache import KVCache
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.replay.decode_replay import Attend
from deployments.engine.replay.static_decode import CpuStaticDecodeStep

logger = logging.getLogger(__name__)

aten = torch.ops.aten

ALLOCATIONS = (aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default)


class NotProgrammableError(ValueError):
    """A step computes with more than kernels and views; the message says with what."""


class CpuDecodeReplay:
    """Runs decode steps as programs, by the numbers of rows and threads; see `DecodeReplay`.

    All programs use the same memory, so only one thread may use them at a time.
    """

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        kv: KVCache,
        max_rows: int,
        attend: Callable[[PackedStep], Attend],
    ) -> None:
        """Split the graph; a program is captured by `prepare`, or by the first step of its size.

        Args:
            graph: Takes token ids, positions, the rows that are due, and attention; calls kernels
                by `launch`.
            kv: The KV cache.
            max_rows: The most rows of a step.
            attend: Returns the attention of a step.
        """
        self._kv = kv
        self._attend = attend
        self._memory = _BufferPool(max_rows)
        self._programs: dict[tuple[int, int], _DecodeProgram] = {}
        self._refused: set[tuple[int, int]] = set()
        self._parts: tuple[torch.fx.GraphModule, torch.fx.GraphModule] | None = None
        try:
            if can_run():
                self._parts = _split_at_kernels(graph)
        except NotProgrammableError as error:
            logger.info("decode steps run call by call: %s", error)

    @property
    def num_captured(self) -> int:
        """The number of programs that are kept now."""
        return len(self._programs)

    @torch.inference_mode()
    def prepare(self, least: int, most: int) -> None:
        """Capture steps of `least`, twice as many ... `most` rows, which compiles all kernels.

        The first step of a size would wait for that. A step of another size still waits for its
        capture.
        """
        num_rows = least
        while num_rows < most:
            self._prepare(num_rows)
            num_rows *= 2
        self._prepare(most)

    def _prepare(self, num_rows: int) -> None:
        if self._parts is not None:
            self._find(num_rows, self._inputs((0,) * num_rows, (0,) * num_rows))

    def run(self, token_ids: Sequence[int], step: PackedStep) -> torch.Tensor | None:
        """Run a step; see `DecodeReplay`. None if there is no program for such a step."""
        size = step.num_decode, torch.get_num_threads()
        if self._parts is None or size in self._refused:
            return None
        inputs = self._inputs(token_ids, step.decode_positions)
        program = self._find(step.num_decode, inputs)
        if program is None:
            return None
        return program.run(inputs, step)[0].to(torch.float32, copy=True)

    def drop(self) -> None:
        """Drop all programs and their buffers."""
        self._programs.clear()
        self._memory.clear()

    def _inputs(self, token_ids: Sequence[int], positions: Sequence[int]) -> Sequence[Any]:
        """Run what comes before the first kernel, for rows that are all due."""
        assert self._parts is not None
        first, _ = self._parts
        rows = torch.tensor([token_ids, positions])
        found: Sequence[Any] = first(rows[:1], rows[1:], torch.arange(len(token_ids)))
        return found

    def _find(self, num_rows: int, inputs: Sequence[Any]) -> "_DecodeProgram | None":
        """Return the program of steps of `num_rows` rows, captured now if need be; None if none."""
        size = num_rows, torch.get_num_threads()
        if size in self._programs or size in self._refused:
            return self._programs.get(size)
        assert self._parts is not None
        _, rest = self._parts
        try:
            self._programs[size] = self._capture(rest, inputs, num_rows)
        except NotProgrammableError as error:
            logger.info("decode steps of %d rows run call by call: %s", num_rows, error)
            self._refused.add(size)
        return self._programs.get(size)

    def _capture(
        self, rest: torch.fx.GraphModule, inputs: Sequence[Any], num_rows: int
    ) -> "_DecodeProgram":
        """Capture the calls of a step of `num_rows` rows.

        Raises:
            NotProgrammableError: The step also computes with torch's own operators.
        """
        held = tuple(map(_writable, inputs))
        static_step = CpuStaticDecodeStep.of(self._kv, num_rows)
        calls = _CapturedCalls(self._memory, num_rows)
        try:
            with captured_by(calls), _KernelsOnly():  # type: ignore[no-untyped-call] # see below
                logits = _CapturingInterpreter(rest, calls).run(*held, self._attend(static_step))
        finally:
            calls.end()
        return _DecodeProgram(KernelProgram(calls.made), held, static_step, logits)


def _writable(value: object) -> object:
    """Return a tensor whose elements share no memory; return other values unchanged.

    A tensor without shared elements is not copied: it may be a view of the weights.
    """
    return value.clone() if isinstance(value, torch.Tensor) and 0 in value.stride() else value


class _DecodeProgram:
    """Runs steps with a fixed number of rows."""

    def __init__(
        self,
        program: KernelProgram,
        inputs: tuple[Any, ...],
        static_step: CpuStaticDecodeStep,
        logits: torch.Tensor,
    ) -> None:
        self._program, self._inputs = program, inputs
        self._static_step, self._logits = static_step, logits

    def run(self, inputs: Sequence[Any], step: PackedStep) -> torch.Tensor:
        for held, new in zip(self._inputs, inputs, strict=True):
            # An input at the same address in two steps is a view of the weights.
            if isinstance(held, torch.Tensor) and held.data_ptr() != new.data_ptr():
                held.copy_(new)
        self._static_step.take(step)
        self._program.run(torch.get_num_threads())
        return self._logits


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
