"""Two watches: EngineCore watches whether the replica lives, and the replica whether a step hangs.

EngineCore and its workers are processes of their own. After a kill -9 of the replica, nothing tells
them: they would go on computing, and hold the GPU's memory. So EngineCore ends when the replica's
process has ended. A worker notices the end of EngineCore by itself only seconds later, so it is
killed first.

A signal at the parent's end (PR_SET_PDEATHSIG) is no way: the kernel sends it when the *thread*
that started the process ends, which need not be the replica's main thread.

vLLM itself knows of processes that have ended, but not of one that hangs, so `Watch` looks for
progress. A replica that stood still itself, because its machine was paused or others had its core,
has not read what the engine did meanwhile: that time counts for little. Needs no vLLM.
"""

import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from deployments.vllm_engine.logs import remove_inherited

HANG_S: Final = 8.0
"""Seconds without a step, while sequences run, after which an engine may be taken to hang. With the
time to notice it, streams move within ten."""

LOOK_S: Final = 1.0
"""Seconds between two looks."""

MOST_S: Final = 60.0
"""The bound on a GPU until the first step has ended, which compiles kernels, and the largest bound
of later ones."""

STEPS: Final = 10
"""On a GPU, a step that takes this many times as long as the longest one so far hangs."""

BUSY_PART: Final = 0.1
"""On a CPU, a step may take longer than HANG_S. An engine that used less than this part of a core
since the last look does not compute, unless one of its threads waits for a core or a disk."""

WORKING: Final = frozenset("RD")
"""States of a thread that computes, waits for a core, or waits for a disk (proc(5))."""

STOPPED: Final = "T"
"""State of a thread that a signal has stopped."""


def end_with_parent() -> None:
    """Start a thread that ends this process and its children once its parent has ended.

    Does nothing in a process that multiprocessing did not start: there, the engine runs in the
    replica itself.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    threading.Thread(
        target=watch, args=(parent.pid, _end_all), daemon=True, name="parent-watch"
    ).start()


def _end_all() -> None:
    """End this process and its descendants, and remove what the killed replica could not."""
    try:
        remove_inherited()
    finally:
        end_family()


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
    """Kill this process's descendants, then this process, even if one can't be killed."""
    try:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Activity:
    """What the processes below this one do.

    Attributes:
        cpu_s: The CPU time that they have used.
        is_working: Whether a thread of one runs, or waits for a core or a disk.
        is_stopped: Whether one is stopped: what the others do comes to nothing.
    """

    cpu_s: float
    is_working: bool = False
    is_stopped: bool = False


def activity_below() -> Activity:
    """Return what the processes below this one do; those that end meanwhile do nothing."""
    cpu_s = 0.0
    states = set[str]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            times = process.cpu_times()
            cpu_s += times.user + times.system
            states.update(_thread_states(process.pid))
    return Activity(cpu_s, not states.isdisjoint(WORKING), STOPPED in states)


def _thread_states(pid: int) -> Iterator[str]:
    """Yield the states of a process's threads: its main thread sleeps while it waits for others."""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            yield thread.read_text().rpartition(") ")[2][0]


class Looks:
    """Counts the seconds between looks, of which a standstill of this process counts for little."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Start to count.

        Args:
            now_s: The clock.
        """
        self._now_s = now_s
        self._looked_s = now_s()

    def passed_s(self) -> float:
        """Return the seconds since the last look, at most twice `LOOK_S`, and look again."""
        before_s, self._looked_s = self._looked_s, self._now_s()
        return min(self._looked_s - before_s, 2 * LOOK_S)


class Watch:
    """Tells whether an engine that has work can only hang."""

    def __init__(
        self,
        *,
        on_cpu: bool,
        now_s: Callable[[], float] = time.monotonic,
        read_activity: Callable[[], Activity] = activity_below,
    ) -> None:
        """Start to measure.

        Args:
            on_cpu: Whether the model runs on the CPU.
            now_s: The clock.
            read_activity: Tells what the engine's processes do.
        """
        self._on_cpu = on_cpu
        self._now_s = now_s
        self._read_activity = read_activity
        self._num_steps = 0
        self._longest_s = 0.0  # of all steps but the first
        self._progress_s = now_s()
        self._looks = Looks(now_s)
        # Since the last progress or, on a CPU, sign of work; without the replica's own standstills.
        self._waited_s = 0.0
        self._used_s: float | None = None  # the CPU time until the last look

    def note_begin(self) -> None:
        """Note that there was nothing to do until now."""
        self._progress_s = self._now_s()
        self._looks.passed_s()
        self._waited_s = 0.0
        self._used_s = None

    def note_progress(self) -> None:
        """Note that a step has ended."""
        if self._num_steps > 0:
            self._longest_s = max(self._longest_s, self._now_s() - self._progress_s)
        self._num_steps += 1
        self.note_begin()

    def is_hung(self) -> bool:
        """Return whether nothing has happened for so long that nothing will.

        To be asked every `LOOK_S`.
        """
        passed_s = self._looks.passed_s()
        self._waited_s += passed_s
        if not self._on_cpu:
            return self._waited_s >= self._bound_s
        if self._waited_s >= LOOK_S and self._works(passed_s):
            self._waited_s = 0.0
        return self._waited_s >= HANG_S

    def _works(self, passed_s: float) -> bool:
        """Return whether a CPU's engine shows any sign of work since the last look."""
        activity = self._read_activity()
        used_s, self._used_s = self._used_s, activity.cpu_s
        has_used = used_s is not None and activity.cpu_s - used_s >= BUSY_PART * passed_s
        return (activity.is_working or has_used) and not activity.is_stopped

    @property
    def _bound_s(self) -> float:
        """The seconds without a step after which a GPU's engine can only hang."""
        if self._num_steps == 0:
            return MOST_S
        return min(MOST_S, max(HANG_S, STEPS * self._longest_s))
