"""How compiled kernels are called: at once, or noted down to be called together later.

Each kernel takes the address of an array of 64-bit integers, one of which is a ticket: threads that
run the kernel draw their work by it, so that any number of them may.
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from deployments.engine.cpu.openmp import run_briefly, run_shared


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel and what it works on.

    Attributes:
        kernel: Address of a function for a parallel region.
        arguments: What it is given the address of; no ticket is taken yet.
    """

    kernel: int
    arguments: ctypes.Array[ctypes.c_int64]


class Recorder(Protocol):
    """Notes down calls, and gives memory for what they compute."""

    def note(self, call: KernelCall) -> None:
        """Take a call that is not made."""
        ...

    def empty(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return memory that holds for as long as the calls may be made."""
        ...


class _Current(threading.local):
    recorder: Recorder | None = None


_current = _Current()


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Let this thread's calls be noted in place of being made."""
    _current.recorder = recorder
    try:
        yield
    finally:
        _current.recorder = None


def launch(call: KernelCall, num_threads: int) -> None:
    """Call a kernel on so many of torch's threads.

    Args:
        call: The kernel and its arguments.
        num_threads: 0 for a call of microseconds, on this thread, which keeps Python's lock.
    """
    if _current.recorder is not None:
        _current.recorder.note(call)
    elif num_threads:
        run_shared(call.kernel, call.arguments, num_threads)
    else:
        run_briefly(call.kernel, call.arguments)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for a kernel's output, contiguous."""
    if _current.recorder is None:
        return torch.empty(shape, dtype=dtype)
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    return _current.recorder.empty(shape, strides, dtype)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory for a kernel's output, laid out as torch's `empty_like` does."""
    if _current.recorder is None:
        return torch.empty_like(tensor)
    strides = torch.empty_like(tensor, device="meta").stride()
    return _current.recorder.empty(tensor.shape, strides, tensor.dtype)
