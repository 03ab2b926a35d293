"""Compiles kernels with numba, and adds the operations on memory and bits that numba lacks.

torch gives addresses as integers, so kernels make pointers from them. numpy has no bfloat16, so its
values are read as 16-bit integers, which are the upper half of a float32.

A compiled kernel is cached next to its source for the next start, or in the user's cache folder.
numba recompiles it when its own file changes, but not when the file of a function that it calls
does. It runs what it finds there, so a folder in which other users could put something is not used.
"""

import logging
import os
import stat
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import caching, cgutils, types
from numba.extending import intrinsic

logger = logging.getLogger(__name__)

_kernels: list[object] = []
"""Keeps the code of all compiled kernels alive."""


def compile_kernel(function: Callable[..., Any]) -> int:
    """Compile a function for the threads of a parallel region; return its address.

    If there is no folder to cache it in, the kernel is compiled at each start.

    Args:
        function: A function that numba can compile, with one argument: the address of its array.
    """
    compiled: Any = partial(numba.cfunc, types.void(types.int64), error_model="numpy")
    worker = compiled(cache=_can_cache(function))(function)
    _kernels.append(worker)
    address: int = worker.address
    return address


def _can_cache(function: Callable[..., Any]) -> bool:
    """Return whether numba has a folder for the function's code in which others can't write."""
    try:
        folder = _cache_folder(function)
    except RuntimeError as error:
        return _note_uncached(str(error))
    # A user who can write next to the source can change the source as well.
    if folder.is_relative_to(Path(__file__).parents[4]) or is_private(folder):
        return True
    return _note_uncached(f"other users could write to {folder}")


def _cache_folder(function: Callable[..., Any]) -> Path:
    """Return the folder in which numba caches a function.

    Raises:
        RuntimeError: It can write to none.
    """
    return Path(caching.CompileResultCacheImpl(function).locator.get_cache_path())


@cache
def _note_uncached(why: str) -> bool:
    """Log once that kernels are not cached; return False."""
    logger.info("kernels are compiled at each start: %s", why)
    return False


def is_private(folder: Path) -> bool:
    """Return whether only this user, its group and root can write to a folder or replace it."""
    for each in (folder, *folder.parents):
        status = each.stat()
        mode = status.st_mode
        is_open = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and status.st_gid != os.getgid())
        # In a sticky folder, others may add something but not replace what is there.
        if is_open and (each == folder or not mode & stat.S_ISVTX):
            return False
        if status.st_uid not in (0, os.getuid()):
            return False
    return True


@intrinsic
def pointer_to(typing_context: Any, address: Any) -> Any:
    """Return an integer address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), generate


@intrinsic
def take_ticket(typing_context: Any, address: Any) -> Any:
    """Atomically add one to the 64-bit integer at an address; return its previous value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.IntType(64)(1), "monotonic")

    return types.int64(types.intp), generate


@intrinsic
def as_float32(typing_context: Any, value: Any) -> Any:
    """Return a float32 unchanged; convert the 16 bits of a bfloat16 to float32."""

    def widen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, wide.type(16)), ir.FloatType())

    def keep(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[0]

    return types.float32(value), widen if value == types.uint16 else keep


@intrinsic
def cast_like(typing_context: Any, sample: Any, value: Any) -> Any:
    """Return a float32 in the sample's type: unchanged, or as the bits of the nearest bfloat16."""

    def narrow(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[1], ir.IntType(32))
        upper = builder.lshr(bits, bits.type(16))
        # Half of the last kept bit, or just less than half where the tie must round down to even.
        half = builder.add(builder.and_(upper, bits.type(1)), bits.type(0x7FFF))
        rounded = builder.lshr(builder.add(bits, half), bits.type(16))
        return builder.trunc(rounded, ir.IntType(16))

    def keep(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[1]

    return sample(sample, types.float32), narrow if sample == types.uint16 else keep


@intrinsic
def _float32_of_bits(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def fused_multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of float32, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@numba.njit(inline="always")
def power_of_two(exponent):
    """Return 2 ** exponent as a float32, for an int32 from -126 to 127."""
    return _float32_of_bits((exponent + np.int32(127)) << np.int32(23))
