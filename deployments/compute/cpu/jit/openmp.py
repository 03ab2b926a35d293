"""Runs compiled kernels in parallel regions on the threads that torch computes with.

A second thread pool would compete with torch's for the cores, since idle threads spin before they
sleep. So kernels enter parallel regions through the library that torch has loaded, on the calling
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
"""Takes the address of a C function of one pointer, its argument, the number of threads, and 0 for
no flags."""

CFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
GilHoldingCFunction = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


@cache
def find_parallel() -> Parallel | None:
    """Return libgomp's entry into a parallel region; None if torch uses another OpenMP library."""
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
    """Return the address of libgomp's barrier for the threads of a region; None without libgomp."""
    library = _libgomp()
    return None if library is None else ctypes.cast(library.GOMP_barrier, ctypes.c_void_p).value


@cache
def _libgomp() -> ctypes.CDLL | None:
    libraries = list((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if len(libraries) != 1:
        logger.info("torch ships no libgomp: kernels run on one thread")
        return None
    return ctypes.CDLL(str(libraries[0]))


def run_parallel(function: int, argument: ctypes.Array[ctypes.c_int64], num_threads: int) -> None:
    """Run a C function on `num_threads` of torch's threads; without libgomp, on this thread."""
    parallel = find_parallel()
    if parallel is None:
        _releasing_gil(function)(argument)
    else:
        parallel(function, argument, num_threads, 0)


def run_holding_gil(function: int, argument: ctypes.Array[ctypes.c_int64]) -> None:
    """Run a short C function on the calling thread, without releasing the GIL.

    If it were released so often, this thread would often wait to get it back.
    """
    _holding_gil(function)(argument)


Function = Callable[[ctypes.Array[ctypes.c_int64]], None]


@cache
def _releasing_gil(function: int) -> Function:
    return CFunction(function)


@cache
def _holding_gil(function: int) -> Function:
    return GilHoldingCFunction(function)
