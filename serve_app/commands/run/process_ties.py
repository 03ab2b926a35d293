"""What Linux offers so that no process outlives the one that it belongs to.

Elsewhere these functions do nothing: HAProxy's mode exists only on Linux.

Source: PR_SET_PDEATHSIG(2const), PR_SET_CHILD_SUBREAPER(2const)
"""

import ctypes
import os
import sys
from signal import SIGKILL

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    The request outlives `exec`, but not `fork`. A parent that has ended before is not noticed.
    """
    _prctl(PR_SET_PDEATHSIG, SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, argument: int) -> None:
    if sys.platform != "linux":
        return
    rest = (ctypes.c_ulong(value) for value in (argument, 0, 0, 0))
    if ctypes.CDLL(None, use_errno=True).prctl(option, *rest) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
