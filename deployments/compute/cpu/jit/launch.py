"""Launches compiled kernels at once, or captures their calls to run them together later.

A kernel takes the address of an array of 64-bit integers. One of them is a ticket counter from
which threads take their work, so any number of threads may run the kernel.
"""

import ctypes
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol

import torch

from deployments.compute.cpu.jit.openmp import run_holding_gil, run_parallel

MAX_HELD_US: Final = 2_000
"""The longest call, in microseconds, that keeps the GIL. A call that releases it may wait for 5,000
to get it back, because Python lets the next holder keep it that long."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel and its arguments.

    Attributes:
        kernel: Address of a function for a parallel region.
        arguments: The array whose address the function gets; its ticket counter is 0.
    """

    kernel: int
    arguments: ctypes.Array[ctypes.c_int64]


class CallCapture(Protocol):
    """Keeps calls instead of running them, and allocates memory for their outputs."""

    def capture(self, call: KernelCall) -> None:
        """Keep a call instead of running it now."""
        ...

    def empty(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return memory that stays valid for as long as the calls may run."""
        ...


class _Current(threading.local):
    capture: CallCapture | None = None
    max_held_us: float = MAX_HELD_US


_current = _Current()


@contextmanager
def captured_by(capture: CallCapture) -> Iterator[None]:
    """Capture this thread's calls instead of running them."""
    _current.capture = capture
    try:
        yield
    finally:
        _current.capture = None


@contextmanager
def releasing_gil() -> Iterator[None]:
    """Release the GIL in each of this thread's calls, since other threads compute meanwhile."""
    _current.max_held_us = 0
    try:
        yield
    finally:
        _current.max_held_us = MAX_HELD_US


def launch(call: KernelCall, num_threads: int, cost_us: float) -> None:
    """Run a kernel on `num_threads` of torch's threads, or capture the call.

    A call on this thread alone keeps the GIL, unless it is long, or within `releasing_gil`.

    Args:
        call: The kernel and its arguments.
        num_threads: 1 runs the kernel on this thread.
        cost_us: About how many microseconds it takes on one thread.
    """
    if _current.capture is not None:
        _current.capture.capture(call)
    elif num_threads > 1 or cost_us > _current.max_held_us:
        run_parallel(call.kernel, call.arguments, num_threads)
    else:
        run_holding_gil(call.kernel, call.arguments)


@cache
def bits_of(number: float) -> int:
    """Return a float64 as a kernel's argument."""
    (bits,) = struct.unpack("q", struct.pack("d", number))
    assert isinstance(bits, int)
    return bits


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return contiguous memory for a kernel's output."""
    if _current.capture is None:
        return torch.empty(shape, dtype=dtype)
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    return _current.capture.empty(shape, strides, dtype)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory for a kernel's output, with the strides of torch's `empty_like`."""
    if _current.capture is None:
        return torch.empty_like(tensor)
    strides = torch.empty_like(tensor, device="meta").stride()
    return _current.capture.empty(tensor.shape, strides, tensor.dtype)
