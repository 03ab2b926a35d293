"""Parallel regions on the threads that torch computes with.

A second pool of threads would fight torch's for the cores: its idle threads spin before they sleep.
So compiled kernels enter parallel regions by the very library that torch has loaded, on the calling
thread's pool.

Source: https://gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html
"""

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

Parallel = Callable[[int, ctypes.Array[ctypes.c_int64], int, int], None]
"""Runs a C function of one pointer: its address, the argument, the number of threads, and 0."""

CFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
LockedCFunction = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


@cache
def find_parallel() -> Parallel | None:
    """Return libgomp's entry into a parallel region; None where torch computes with another."""
    library = _libgomp()
    if library is None:
        return None
    parallel = library.GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    found: Parallel = parallel
    return found


@cache
def find_barrier() -> int | None:
    """Return the address of the function by which the threads of a region wait for each other."""
    library = _libgomp()
    return None if library is None else ctypes.cast(library.GOMP_barrier, ctypes.c_void_p).value


@cache
def _libgomp() -> ctypes.CDLL | None:
    libraries = list((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if len(libraries) != 1:
        logger.info("torch brings no libgomp")
        return None
    return ctypes.CDLL(str(libraries[0]))


def run_shared(function: int, argument: ctypes.Array[ctypes.c_int64], num_threads: int) -> None:
    """Run a C function on so many of torch's threads; where they can't be had, on this one."""
    parallel = find_parallel()
    if parallel is None:
        _released(function)(argument)
    else:
        parallel(function, argument, num_threads, 0)


def run_briefly(function: int, argument: ctypes.Array[ctypes.c_int64]) -> None:
    """Run a C function of microseconds on the calling thread, which keeps Python's lock.

    Let go of so often, it would have to be waited for.
    """
    _locked(function)(argument)


Function = Callable[[ctypes.Array[ctypes.c_int64]], None]


@cache
def _released(function: int) -> Function:
    return CFunction(function)


@cache
def _locked(function: int) -> Function:
    return LockedCFunction(function)
