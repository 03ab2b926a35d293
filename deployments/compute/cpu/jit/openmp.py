"""Runs compiled kernels in parallel regions on the threads that torch computes with.

A second thread pool would compete with torch's for the cores, since idle threads spin before they
sleep. So kernels enter parallel regions through the library that torch has loaded, on the calling
thread's pool. torch's wheels for Linux bring libgomp; a torch that was built on LLVM's or Intel's
library has the same entries there, but not on macOS.

Source: https://gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html
"""

import ctypes
import logging
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

Parallel = Callable[[int, ctypes.Array[ctypes.c_int64], int, int], None]
"""Takes the address of a C function of one pointer, its argument, the number of threads, and 0 for
no flags."""

ENTRIES = ("GOMP_parallel", "GOMP_barrier")

MAPS = Path("/proc/self/maps")
"""Where Linux tells the files that this process has mapped."""

CFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
GilHoldingCFunction = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


@cache
def find_parallel() -> Parallel | None:
    """Return the entry into a parallel region; None if torch's OpenMP library has none."""
    library = _find_library()
    if library is None:
        return None
    parallel = library.GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    found: Parallel = parallel
    return found


@cache
def find_barrier() -> int | None:
    """Return the address of the barrier for the threads of a region; None without an entry."""
    library = _find_library()
    return None if library is None else ctypes.cast(library.GOMP_barrier, ctypes.c_void_p).value


@cache
def _find_library() -> ctypes.CDLL | None:
    shipped = list(filter(_is_openmp, (Path(torch.__file__).parent / "lib").glob("lib*.so*")))
    # Without OpenMP in torch, a library that is loaded belongs to another package.
    built_with = torch.backends.openmp.is_available()  # type: ignore[no-untyped-call] # left untyped
    paths = (shipped or _loaded_libraries()) if built_with else []
    library = _open(paths[0]) if len(paths) == 1 else None
    if library is None or not all(hasattr(library, name) for name in ENTRIES):
        logger.warning(
            "compiled kernels run on one thread, and slower: torch's OpenMP library is not one "
            "whose parallel regions they can enter (found: %s)",
            ", ".join(path.name for path in paths) or "none",
        )
        return None
    return library


def _open(path: Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # the file has been replaced since it was mapped
        return None


def _loaded_libraries() -> list[Path]:
    """Return the OpenMP libraries that this process has loaded.

    Empty where /proc/self/maps can't be read.
    """
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:
        return []
    paths = {Path(line.split(maxsplit=5)[-1]) for line in lines if ".so" in line}
    return [path for path in paths if _is_openmp(path)]


def _is_openmp(path: Path) -> bool:
    return re.match(r"lib(gomp|omp|iomp5)\b.*\.so", path.name) is not None


def run_parallel(function: int, argument: ctypes.Array[ctypes.c_int64], num_threads: int) -> None:
    """Run a C function on `num_threads` of torch's threads; without an entry, on this one."""
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
