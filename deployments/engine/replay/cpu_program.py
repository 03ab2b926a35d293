"""A recorded forward pass's decode steps as programs of kernels.

A decode step is hundreds of calls, many of microseconds, and Python stands between any two of them.
But what a step of n rows calls is always the same: the same kernels on the same memory, but for the
rows that it begins with and for how far each row sees. So the calls of the first step of n rows are
noted down, with memory of their own, and the later ones are made as a whole, without Python.

What comes before the first kernel (the embedding, the tables of rotary positions) is torch's in
every step. From there on there may be kernels and views alone: a model with more than that goes on
call by call.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deployments.engine.cpu import fused_ops
from deployments.engine.cpu.kernel_program import EPOCH, KernelProgram, can_run
from deployments.engine.cpu.launch import KernelCall, recorded
from deployments.engine.cpu.row_attention import SlotRows
from deployments.engine.kv_slots import KVSlots
from deployments.engine.packed_step import DecodePlaces, PackedStep

logger = logging.getLogger(__name__)

aten = torch.ops.aten

Attend = Callable[..., torch.Tensor]
"""A step's attention, as a recorded graph calls it: queries, keys, values, and which call it is."""

ALLOCATIONS = (aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default)


class NotProgrammableError(ValueError):
    """There is more than kernels and views; the message says what."""


class DecodePrograms:
    """The programs of one graph on one set of slots, by the number of rows.

    All work in the same memory, so one thread at a time may use them.

    Attributes:
        kv: The slots.
    """

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        kv: KVSlots,
        attend: Callable[[PackedStep], Attend],
    ) -> None:
        """Prepare; each program is made by the first step of its size.

        Args:
            graph: Takes token ids, positions, the rows that are due, and attention, and calls
                kernels by `launch`.
            kv: The slots.
            attend: Returns the attention of a step.
        """
        self.kv = kv
        self._attend = attend
        self._memory = _Memory(kv.num_slots)
        self._programs: dict[tuple[int, int], _DecodeProgram] = {}
        self._refused: set[tuple[int, int]] = set()
        self._parts: tuple[torch.fx.GraphModule, torch.fx.GraphModule] | None = None
        try:
            if can_run():
                self._parts = _cut(graph)
        except NotProgrammableError as error:
            logger.info("decode steps run call by call: %s", error)

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, due: torch.Tensor, step: PackedStep
    ) -> torch.Tensor | None:
        """Run a step; see `Forward`.

        Returns:
            The logits, in memory that the next step uses again; None if there is no program for
            such a step.
        """
        if self._parts is None or step.chunks or len(due) != step.num_decode:
            return None
        size = step.num_decode, torch.get_num_threads()
        if size in self._refused:
            return None
        first, rest = self._parts
        inputs = first(token_ids, positions, due)
        program = self._programs.get(size)
        if program is None:
            try:
                program = self._programs[size] = self._record(rest, inputs, step.num_decode)
            except NotProgrammableError as error:
                logger.info("decode steps of %d rows run call by call: %s", step.num_decode, error)
                self._refused.add(size)
                return None
        return program.run(inputs, step)

    def _record(
        self, rest: torch.fx.GraphModule, inputs: Sequence[Any], num_rows: int
    ) -> "_DecodeProgram":
        """Note what a step of so many rows calls.

        Raises:
            NotProgrammableError: It computes with torch's own operators, too.
        """
        held = tuple(map(_writable, inputs))
        fixed = _FixedDecode.of(self.kv, num_rows)
        recorder = _CallRecorder(self._memory, num_rows)
        try:
            with recorded(recorder), _KernelsAlone():  # type: ignore[no-untyped-call] # see below
                logits = _Recording(rest, recorder).run(*held, self._attend(fixed))
        finally:
            recorder.end()
        return _DecodeProgram(KernelProgram(recorder.calls), held, fixed, logits)


def _writable(value: object) -> object:
    """Return a tensor with memory for each of its elements; whatever else there is as it is.

    It is no copy where it need not be: what comes before the kernels may be a view of the weights.
    """
    return value.clone() if isinstance(value, torch.Tensor) and 0 in value.stride() else value


class _FixedDecode(PackedStep):
    """A step of decode rows whose places stand where a program reads them."""

    @classmethod
    def of(cls, kv: KVSlots, num_rows: int) -> "_FixedDecode":
        """Return a step of so many rows, each at the end of a slot of its own."""
        slots, last = tuple(range(num_rows)), (kv.max_model_len - 1,) * num_rows
        step = cls(kv, slots, last, ())
        for capacity in set(kv.capacities):
            step.decode_places(capacity)
        return step

    def take(self, step: PackedStep) -> None:
        """Let the rows stand where another step's do."""
        for capacity, places in self._decode_places.items():
            _rows(places).places[:] = _rows(step.decode_places(capacity)).places


def _rows(places: DecodePlaces) -> SlotRows:
    assert places.rows is not None
    return places.rows


class _DecodeProgram:
    """The steps of so many rows."""

    def __init__(
        self,
        program: KernelProgram,
        inputs: tuple[Any, ...],
        fixed: _FixedDecode,
        logits: torch.Tensor,
    ) -> None:
        self._program, self._inputs, self._fixed, self._logits = program, inputs, fixed, logits

    def run(self, inputs: Sequence[Any], step: PackedStep) -> torch.Tensor:
        for held, new in zip(self._inputs, inputs, strict=True):
            # The same memory in two steps is that of weights.
            if isinstance(held, torch.Tensor) and held.data_ptr() != new.data_ptr():
                held.copy_(new)
        self._fixed.take(step)
        self._program.run(torch.get_num_threads())
        return self._logits


class _Memory:
    """Pieces of memory, each for all rows that there can be, by the bytes of a row."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, row_bytes: int) -> torch.Tensor:
        free = self._free.setdefault(row_bytes, [])
        return free.pop() if free else torch.empty(row_bytes * self._max_rows, dtype=torch.uint8)

    def give_back(self, row_bytes: int, piece: torch.Tensor) -> None:
        self._free[row_bytes].append(piece)


class _CallRecorder:
    """Notes calls, and lends memory until nothing that is still used stands in it.

    What comes back is lent again in the next epoch: see `kernel_program`.
    """

    def __init__(self, memory: _Memory, num_rows: int) -> None:
        self.calls: list[KernelCall] = []
        self._memory = memory
        self._num_rows = num_rows
        self._lent: dict[int, tuple[int, torch.Tensor]] = {}
        self._resting: list[tuple[int, torch.Tensor]] = []

    def note(self, call: KernelCall) -> None:
        self.calls.append(call)
        if len(self.calls) % EPOCH == 0:
            self._wake()

    def empty(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        num_elements = torch.Size(shape).numel()
        row_bytes, odd = divmod(num_elements * dtype.itemsize, self._num_rows)
        if odd:
            raise NotProgrammableError("an output that is not made of rows")
        piece = self._memory.take(row_bytes)
        self._lent[piece.untyped_storage().data_ptr()] = row_bytes, piece
        elements = piece[: row_bytes * self._num_rows].view(dtype)
        return elements.as_strided(shape, strides)

    def give_back(self, values: Iterable[object]) -> None:
        """Take back all memory but what these values stand in."""
        used = {t.untyped_storage().data_ptr() for t in values if _has_storage(t)}
        self._resting += [self._lent.pop(address) for address in self._lent.keys() - used]

    def end(self) -> None:
        """Take back all memory."""
        self.give_back(())
        self._wake()

    def _wake(self) -> None:
        for piece in self._resting:
            self._memory.give_back(*piece)
        self._resting.clear()


def _has_storage(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether it is a tensor, and none that oneDNN has packed."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


class _Recording(torch.fx.Interpreter):
    """Walks through a graph whose kernels are noted; memory is lent until a value's last use."""

    def __init__(self, graph: torch.fx.GraphModule, recorder: _CallRecorder) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # it would go into the message of every refusal
        self._recorder = recorder

    def run_node(self, n: torch.fx.Node) -> Any:
        parts = (v if isinstance(v, tuple | list) else (v,) for v in self.env.values())
        self._recorder.give_back(chain.from_iterable(parts))
        return super().run_node(n)


class _KernelsAlone(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Refuses what computes by torch's own operators; views and memory are allowed."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Some operators compute only at times, as `contiguous` does: it shows in what they call.
        with self:
            found = func.decompose(*args, **(kwargs or {}))
        if found is not NotImplemented:
            return found
        is_view = all(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and func not in ALLOCATIONS:
            raise NotProgrammableError(f"{func} between kernels")
        return func(*args, **(kwargs or {}))


def _cut(graph: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Return what comes before the kernels, and the rest.

    Returns:
        From token ids, positions and the rows that are due to a tuple; from its elements and
        attention to the logits, with each row due.

    Raises:
        NotProgrammableError: It can't be cut so.
    """
    token_ids, positions, due, attend = graph.graph.find_nodes(op="placeholder")
    behind = _behind_kernels(graph.graph, attend)
    edge = [
        node
        for node in graph.graph.nodes
        if node not in behind
        and node.op not in ("get_attr", "placeholder")
        and any(user in behind for user in node.users)
    ]
    first, rest = torch.fx.Graph(), torch.fx.Graph()
    copies = {node: first.placeholder(node.name) for node in (token_ids, positions, due)}
    moved = {node: rest.placeholder(node.name) for node in (*edge, attend)}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            copies[node], moved[node] = (g.node_copy(node) for g in (first, rest))
        elif node in behind:
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
        raise NotProgrammableError(f"{node.name} reads {', '.join(missing)} in another place")
    return graph.node_copy(node, copies.__getitem__)


def _behind_kernels(graph: torch.fx.Graph, attend: torch.fx.Node) -> set[torch.fx.Node]:
    """Return the kernels, and all that needs what they compute."""
    behind = {attend}
    for node in graph.nodes:
        if _is_kernel(node) or any(source in behind for source in node.all_input_nodes):
            behind.add(node)
    return behind - {attend}


def _is_kernel(node: torch.fx.Node) -> bool:
    module = getattr(node.target, "__module__", None)
    return node.op == "call_module" or module == fused_ops.__name__
