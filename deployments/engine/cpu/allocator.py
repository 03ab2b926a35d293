"""Keeps the memory that a step has freed for the next step.

By default glibc returns large blocks to the system at once, and a prefill step of 512 tokens then
spends a quarter of its time on page faults (90,000 of them for a model of 0.5B parameters).
"""

import ctypes
import logging
import platform

logger = logging.getLogger(__name__)

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
"""Parameters of mallopt. Source: malloc.h of glibc."""

KEPT_BYTES = 2**31 - 1
"""As much as mallopt's int can say."""


def keep_freed_memory() -> bool:
    """Set glibc's allocator for the whole process; return whether there was one to set.

    One arena for all threads, since those of other threads than the first are cut into heaps of
    64 MiB, which large blocks don't fit into.
    """
    if platform.libc_ver()[0] != "glibc":
        logger.info("freed memory goes back to the system: this is not glibc")
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, KEPT_BYTES), (M_TRIM_THRESHOLD, KEPT_BYTES))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
