"""Capturing work on a GPU, to launch it again as a whole: CUDA graphs.

A captured run launches the same kernels on the same memory, without Python and without a launch for
each of them. What changes from run to run must change inside that memory.

Not seen on a GPU yet: `decode_graphs` falls back to plain steps should anything here fail, and says
so in the log.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

Run = Callable[[], torch.Tensor]


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Run it again."""
        ...


class GraphCapturer(Protocol):
    """What can capture work on a device."""

    def warm_up(self, run: Run) -> torch.Tensor:
        """Run what will be captured, as it would run then, and return what it gives."""
        ...

    def capture(self, run: Run) -> Graph:
        """Capture what was warmed up; nothing is computed.

        Raises:
            Exception: It does something that can't be captured.
        """
        ...


class CudaCapturer:
    """Captures on one side stream, into one pool of memory for all graphs.

    They never run at the same time and nothing in the pool outlives a run, so they may share it.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, device: torch.device) -> None:
        """Make the stream and the pool."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self._pool = torch.cuda.graph_pool_handle()
        self._broken: list[torch.cuda.CUDAGraph] = []

    def warm_up(self, run: Run) -> torch.Tensor:
        """Run on the side stream, where libraries then set up what a capture must find ready."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                result = run()
        finally:
            # What was launched before a failure still writes to the slots.
            current.wait_stream(self._stream)
        result.record_stream(current)
        return result

    def capture(self, run: Run) -> Graph:
        """Capture on the side stream.

        Raises:
            RuntimeError: Something waited for the device, or memory ran out.
        """
        graph = torch.cuda.CUDAGraph()
        # When a capture fails, `torch.cuda.graph` does not leave its stream; the outer one does.
        # Other threads of the process may use the device meanwhile: hence `thread_local`.
        try:
            with (
                torch.cuda.stream(self._stream),
                torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=self._stream,
                    capture_error_mode="thread_local",
                ),
            ):
                run()
        except BaseException:
            self._abandon(graph)
            raise
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Tell the allocator that a capture is over, where torch has not.

        torch does so only once CUDA has ended the capture, and CUDA ends none that something has
        spoilt. The allocator would then believe in it for ever: it would free none of its cache
        when memory is short, and `empty_cache` would raise.

        Source: torch, aten/src/ATen/cuda/CUDAGraph.cpp, capture_end; c10/cuda/
        CUDACachingAllocator.cpp, synchronize_and_free_events.
        """
        index = self._device.index or 0
        try:
            torch._C._cuda_endAllocateToPool(index, self._pool)
        except RuntimeError:  # torch has: the graph gives the pool back by itself
            return
        torch._C._cuda_releasePool(index, self._pool)
        # The allocator of pinned memory has no such call. It goes on believing in this capture, so
        # the graph has to stay, and the next one needs another pool.
        self._broken.append(graph)
        self._pool = torch.cuda.graph_pool_handle()


def open_capturer(device: torch.device) -> GraphCapturer | None:
    """Return what captures on a device, or None if nothing does."""
    if device.type != "cuda":
        return None
    try:
        return CudaCapturer(device)
    except (AttributeError, RuntimeError):
        logger.warning("decode steps are launched one by one: no CUDA graphs here", exc_info=True)
        return None
