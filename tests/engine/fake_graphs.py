"""Fake CUDA graphs on a CPU: a capture keeps the operators of a run, and a replay runs them again.

As with a CUDA graph, a replay runs no Python of the run: tensors from outside keep their memory,
and numbers keep their values. What a capture forbids raises: reading a tensor's contents, and
copying data from the host. So does the replay of a graph whose tensors have lost the memory that
they had at the capture, even if they have memory again.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FORBIDDEN = frozenset({"_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "equal"})
"""Operators that wait for the device, or copy from pageable host memory."""

releases: Counter[int] = Counter()
"""How often each storage has lost its memory, by the address of the storage; see `FakeCard`."""


class FakeGraph(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Captured operations, in place of a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.num_replays = 0
        self.num_stale_replays = 0  # on memory that was given back
        self.num_parts = 1
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
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
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor) and each.layout is torch.strided:
                storage = each.untyped_storage()
                self._storages[storage._cdata] = storage, releases[storage._cdata]
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        self.num_replays += 1
        if any(releases[at] > number for at, (_, number) in self._storages.items()):
            self.num_stale_replays += 1
            raise RuntimeError("an illegal memory access was encountered")
        made: dict[int, Any] = {}

        def current(value: Any) -> Any:
            return made.get(id(value), value)

        for func, args, kwargs, captured in self._operations:
            result = func(*tree_map(current, args), **tree_map(current, kwargs))
            captured_parts = captured if isinstance(captured, tuple | list) else (captured,)
            parts = result if isinstance(result, tuple | list) else (result,)
            made.update((id(old), new) for old, new in zip(captured_parts, parts, strict=True))


class FakeCapturer:
    """Captures runs as fake graphs, and counts them."""

    graph_bytes = 2**20  # the device's memory that each graph takes

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []  # the captured graphs, in order
        self.num_warm_ups = 0  # how many runs were warmed up
        self.error: Exception | None = None  # raised by the next captures; None lets them succeed
        self._underway: FakeGraph | None = None

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)

    @property
    def num_stale_replays(self) -> int:
        return sum(graph.num_stale_replays for graph in self.graphs)

    @property
    def free_bytes(self) -> int:
        return 2**30 - self.graph_bytes * len(self.graphs)

    def warm_up(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.num_warm_ups += 1
        return run()

    def capture(self, run: Callable[[], torch.Tensor]) -> FakeGraph:
        if self.error is not None:
            raise self.error
        graph = self._underway = FakeGraph()
        try:
            with graph:
                run()
        finally:
            self._underway = None
        self.graphs.append(graph)
        return graph

    def divide(self) -> None:
        if self._underway is not None:
            self._underway.num_parts += 1
