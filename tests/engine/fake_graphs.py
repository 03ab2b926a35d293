"""CUDA graphs on a CPU: what a run asks of torch is recorded, and a replay does it again.

As in a CUDA graph, no Python of the run is executed again: tensors that it did not make itself are
known by their place in memory, and numbers are what they were. And what a capture forbids is
refused: to look at a tensor's contents, and to bring data along from the host.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

FORBIDDEN = frozenset({"_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "equal"})
"""What waits for the device, or copies from ordinary memory of the host."""


class RecordedGraph(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """A recording of operations, in the place of a captured graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.num_replays = 0
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in FORBIDDEN:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        self.num_replays += 1
        made: dict[int, Any] = {}

        def current(value: Any) -> Any:
            return made.get(id(value), value)

        for func, args, kwargs, recorded in self._operations:
            result = func(*tree_map(current, args), **tree_map(current, kwargs))
            recorded_parts = recorded if isinstance(recorded, tuple | list) else (recorded,)
            parts = result if isinstance(result, tuple | list) else (result,)
            made.update((id(old), new) for old, new in zip(recorded_parts, parts, strict=True))


class Recorder:
    """Records runs; counts what it was asked for.

    Attributes:
        graphs: What was recorded, in order.
        num_warm_ups: Runs that were to be recorded.
        error: What the next recordings raise; None lets them pass.
    """

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []
        self.num_warm_ups = 0
        self.error: Exception | None = None

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)

    def warm_up(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.num_warm_ups += 1
        return run()

    def capture(self, run: Callable[[], torch.Tensor]) -> RecordedGraph:
        if self.error is not None:
            raise self.error
        graph = RecordedGraph()
        with graph:
            run()
        self.graphs.append(graph)
        return graph
