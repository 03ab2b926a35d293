"""Captures work on a GPU as CUDA graphs, to launch it again as a whole.

A replay launches the same kernels on the same memory, without Python and without a separate launch
for each kernel. Values that change from run to run must be written to that memory.

If anything here fails, `cuda_replay` falls back to plain steps and logs it.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import torch

logger = logging.getLogger(__name__)

Run = Callable[[], torch.Tensor]


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Run the work again."""
        ...


class GraphCapturer(Protocol):
    """Captures work on a device."""

    @property
    def free_bytes(self) -> int:
        """Memory of the device that no program holds, and that no tensor of this one needs."""
        ...

    def warm_up(self, run: Run) -> torch.Tensor:
        """Run the work as it will be captured, and return its result."""
        ...

    def capture(self, run: Run) -> Graph:
        """Capture work that was warmed up; nothing is computed.

        Raises:
            Exception: The work does something that can't be captured.
        """
        ...

    def divide(self) -> None:
        """Begin another graph; nothing happens unless a capture runs.

        A replay launches the graphs one after the other. So the device begins with the first while
        the host launches the others, which takes as long as a few layers run.
        """
        ...


@dataclass(frozen=True, slots=True)
class GraphParts:
    """Captured work in several graphs."""

    parts: Sequence[torch.cuda.CUDAGraph]

    def replay(self) -> None:
        """Run the work again."""
        for part in self.parts:
            part.replay()


class CudaCapturer:
    """Captures on one side stream, into one pool of memory for all graphs that live.

    The graphs never run at the same time, and nothing in the pool outlives a run, so they can share
    it. Once all of them are dropped, the next one gets a new pool: torch refuses a capture into a
    pool without graphs as long as any tensor still lies there.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, device: torch.device) -> None:
        """Create the stream and the pool."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self._pool = torch.cuda.graph_pool_handle()
        self._living = WeakSet[torch.cuda.CUDAGraph]()
        self._broken: list[torch.cuda.CUDAGraph] = []
        # Of the capture that runs: its graphs, and what ends the last of them.
        self._parts: list[torch.cuda.CUDAGraph] = []
        self._capture: ExitStack | None = None

    @property
    def free_bytes(self) -> int:
        """Memory of the device that no program holds, after the allocator's cache is emptied."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def warm_up(self, run: Run) -> torch.Tensor:
        """Run on the side stream, so that libraries make their preparations for a capture there."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                result = run()
        finally:
            # Work launched before a failure still writes to the KV cache.
            current.wait_stream(self._stream)
        result.record_stream(current)
        return result

    def capture(self, run: Run) -> Graph:
        """Capture on the side stream.

        Raises:
            RuntimeError: The work waited for the device, or memory ran out.
        """
        if not self._living:
            self._pool = torch.cuda.graph_pool_handle()
        # A failed `torch.cuda.graph` does not restore the stream; the outer context does.
        try:
            with torch.cuda.stream(self._stream), ExitStack() as self._capture:
                self._begin(self._capture)
                run()
        except BaseException:
            if self._parts:
                self._abandon(self._parts[-1])
            raise
        finally:
            parts, self._parts, self._capture = self._parts, [], None
        self._living.update(parts)
        return GraphParts(parts)

    def divide(self) -> None:
        """Begin another graph if a capture runs; they share the pool, and what is in it.

        Raises:
            RuntimeError: The work so far can't be captured.
        """
        if self._capture is not None:
            self._capture.close()
            self._begin(self._capture)

    def _begin(self, capture: ExitStack) -> None:
        self._parts.append(torch.cuda.CUDAGraph())
        # `thread_local`, because other threads of the process may use the device meanwhile.
        capture.enter_context(
            torch.cuda.graph(
                self._parts[-1],
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            )
        )

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Tell torch's generator, and its allocator if need be, that a failed capture is over.

        The device's default generator would refuse to draw: it still counts as captured, so it gets
        a new state.

        torch tells the allocator only after CUDA has ended the capture, but CUDA does not end an
        invalidated one. The allocator would then treat it as running for ever: it would not free
        its cache when memory is short, and `empty_cache` would raise.

        Source: torch, aten/src/ATen/cuda/CUDAGraph.cpp, capture_end; c10/cuda/
        CUDACachingAllocator.cpp, synchronize_and_free_events.
        """
        index = self._device.index or 0
        fresh = torch.Generator(self._device)
        torch.cuda.default_generators[index].graphsafe_set_state(fresh.graphsafe_get_state())
        try:
            torch._C._cuda_endAllocateToPool(index, self._pool)
        except RuntimeError:  # torch has ended it; the graph releases the pool itself
            return
        torch._C._cuda_releasePool(index, self._pool)
        # The pinned-memory allocator has no such call and still counts this capture as running. So
        # the graph must be kept, and the next one needs another pool.
        self._broken.append(graph)
        self._pool = torch.cuda.graph_pool_handle()


def open_capturer(device: torch.device) -> GraphCapturer | None:
    """Return a capturer for a device, or None if the device can't capture."""
    if device.type != "cuda":
        return None
    try:
        return CudaCapturer(device)
    except (AttributeError, RuntimeError):
        logger.warning("decode steps are launched one by one: no CUDA graphs here", exc_info=True)
        return None
