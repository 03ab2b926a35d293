"""Compiling kernels with numba.

A compiled kernel is kept beside its source, for the next start. Numba compiles it anew when the
file that holds it changes, but not when one that it calls does.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numba

logger = logging.getLogger(__name__)

Kernel = Callable[..., Any]


def compile_kernel(function: Kernel, *signature: object, fastmath: bool = False) -> Any:
    """Return numba's dispatcher; where no folder can be written, compile at each start.

    Args:
        function: What numba can compile.
        signature: The types of its result and arguments, to compile now; none: at the first call.
        fastmath: Whether sums may be reordered and products contracted.
    """
    compiled = partial(numba.njit, *signature, nogil=True, error_model="numpy", fastmath=fastmath)
    try:
        return compiled(cache=True)(function)
    except RuntimeError as error:  # numba finds no place for its cache
        logger.info("the kernel is compiled at each start: %s", error)
        return compiled()(function)
