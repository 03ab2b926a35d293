"""Compiling kernels with numba.

A compiled kernel is kept beside its source, for the next start. Numba compiles it anew when the
file that holds it changes, but not when one that it calls does.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
from numba import types

logger = logging.getLogger(__name__)


_workers: list[object] = []
"""Holds the code of all that was compiled."""


def compile_worker(function: Callable[..., Any]) -> int:
    """Compile what the threads of a parallel region run; return its address.

    Where no folder can be written, it is compiled at each start.

    Args:
        function: What numba can compile. Its argument is the address of what it works on.
    """
    compiled: Any = partial(numba.cfunc, types.void(types.int64), error_model="numpy")
    try:
        worker = compiled(cache=True)(function)
    except RuntimeError as error:  # numba finds no place for its cache
        logger.info("the kernel is compiled at each start: %s", error)
        worker = compiled()(function)
    _workers.append(worker)
    address: int = worker.address
    return address
