"""Ends EngineCore, and its workers first, when the replica's process has ended.

EngineCore and its workers are processes of their own. After a kill -9 of the replica, nothing tells
them: they would go on computing, and hold the GPU's memory. A worker notices the end of EngineCore
by itself only seconds later, so it is killed first.

A signal at the parent's end (PR_SET_PDEATHSIG) is no way: the kernel sends it when the *thread*
that started the process ends, which need not be the replica's main thread.
"""

import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable

import psutil


def end_with_parent() -> None:
    """Start a thread that ends this process and its children once its parent has ended.

    Does nothing in a process that multiprocessing did not start: there, the engine runs in the
    replica itself.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    threading.Thread(
        target=watch, args=(parent.pid, end_family), daemon=True, name="parent-watch"
    ).start()


def watch(parent_pid: int, end: Callable[[], None]) -> None:
    """Call `end` once the parent has ended; at once if it has ended already."""
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        end()
        return
    # Another process may have got the pid of a parent that ended before: then this one has been
    # given to another parent.
    if os.getppid() == parent_pid:
        poll = select.poll()
        poll.register(parent, select.POLLIN)
        poll.poll()
    end()


def end_family() -> None:
    """Kill this process's descendants, then this process."""
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os.kill(os.getpid(), signal.SIGKILL)
