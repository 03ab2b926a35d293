"""Manages the process's memory on a CPU: what is kept, what is given back, and huge pages.

By default glibc returns large freed blocks to the system at once. A prefill step of 512 tokens then
spends a quarter of its time on page faults (90,000 of them for a model of 0.5B parameters).

A decode step reads all weights once. On pages of 4 KiB each core looks up a new page every 64 cache
lines, and prefetching stops at the end of each page. On pages of 2 MiB the linear layers of
Qwen2-0.5B took 3 to 9 % less time (1 to 32 rows, two cores of a Zen 5).

Keys and values are reserved for the most sequences that may run, and mostly fewer do. So they lie
in a mapping of their own (`ReservedMemory`), whose pages come with the first write to each.

Source: https://man7.org/linux/man-pages/man2/madvise.2.html
"""

import ctypes
import logging
import mmap
import platform
import sys
from contextlib import suppress
from functools import cache
from math import prod
from typing import Final

import torch

logger = logging.getLogger(__name__)

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
"""Parameters of mallopt. Source: malloc.h of glibc."""

KEPT_BYTES = 2**31 - 1
"""The largest value of mallopt's int."""

MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25
"""Copies pages in use onto huge ones; Linux 6.1 or later."""


GIVE_BACK: Final = mmap.MADV_FREE if sys.platform == "darwin" else mmap.MADV_DONTNEED
"""Linux takes the pages at once, and macOS when another process needs them."""


class ReservedMemory:
    """Address space for tensors, of which only pages that are written take memory.

    The system adds a page, as zeros, with the first write to it. A page that is given back takes no
    memory either, until the next write.
    """

    def __init__(self, num_bytes: int) -> None:
        """Reserve address space.

        Args:
            num_bytes: The sum of `size_of` for all tensors; at least 1.

        Raises:
            MemoryError: The system refuses as much.
        """
        try:
            self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{num_bytes} bytes can't be reserved: {error}") from error
        self._start = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._num_taken = 0

    @staticmethod
    def size_of(size: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the bytes that a tensor takes here: each begins with a page of its own."""
        return -(-prod(size) * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE

    def zeros(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros on pages that nothing has written to yet."""
        offset = self._num_taken
        self._num_taken += self.size_of(size, dtype)
        assert self._num_taken <= len(self._map)
        flat = torch.frombuffer(self._map, dtype=dtype, count=prod(size), offset=offset)
        return flat.view(size)

    def give_back(self, part: torch.Tensor) -> None:
        """Give the pages that lie completely in a part of a tensor back to the system.

        What the part held is lost: it reads as zeros, or on macOS possibly as before. Nothing
        happens if the system refuses, as for a process that has locked its memory.

        Args:
            part: Neighbouring elements of a tensor from `zeros`.
        """
        assert part.is_contiguous()
        first = part.data_ptr() - self._start
        start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (first + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0:
            with suppress(OSError):
                self._map.madvise(GIVE_BACK, start, length)

    def give_back_all(self) -> None:
        """Give all pages back; see `give_back`."""
        with suppress(OSError):
            self._map.madvise(GIVE_BACK)


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory, for the whole process; return whether it accepted all settings.

    All threads share one arena. The arenas of later threads are cut into heaps of 64 MiB, which
    large blocks do not fit into.
    """
    if platform.libc_ver()[0] != "glibc":
        logger.info("freed memory goes back to the system: this is not glibc")
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, KEPT_BYTES), (M_TRIM_THRESHOLD, KEPT_BYTES))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def give_back_pages(address: int, num_bytes: int) -> None:
    """Give the pages that lie completely in this memory back to the system.

    Addresses stay valid: what was there reads as zeros, and the next write adds a page again.
    Nothing happens if the system refuses, as for a process that has locked its memory.

    Args:
        address: Address of the first byte; of memory that is no mapped file.
        num_bytes: Length of the memory.
    """
    madvise = _find_madvise()
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if madvise is not None and length > 0:
        madvise(start, length, GIVE_BACK)


def trim_freed_memory() -> None:
    """Give what was freed, and glibc has kept (`keep_freed_memory`), back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def use_huge_pages(address: int, num_bytes: int) -> bool:
    """Move memory onto huge pages; return whether the kernel did.

    Nothing changes if the kernel can't: on another system, with too little contiguous memory, or
    for less than a huge page.

    Args:
        address: Address of the first byte.
        num_bytes: Length of the memory.
    """
    madvise = _find_madvise()
    if madvise is None:
        return False
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length <= 0:
        return False
    advices = (MADV_HUGEPAGE, MADV_COLLAPSE)
    return all(madvise(start, length, advice) == 0 for advice in advices)


def use_huge_pages_for(packed: torch.Tensor) -> bool:
    """Move a weight in oneDNN's layout onto huge pages; see `use_huge_pages`."""
    ops = torch.ops.mkldnn
    return use_huge_pages(ops.data_ptr(packed), ops._nbytes(packed))


@cache
def _find_madvise() -> "ctypes._NamedFuncPointer | None":
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
