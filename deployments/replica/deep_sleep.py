"""When the process of a replica that sleeps lightly ends: its sleep is deep from then on.

A process that sleeps keeps some 400 MB and its reserved cores. It ends once it has slept for
`deep_sleep_after_s`, or as soon as the machine's memory is short: of several on a node the one that
has slept longest first, and each further one only if memory is still short without it. Serve alone
stops replicas. So a replica reports whether its process is to stay or to end, and
`deployments.autoscaling.LoadPolicy` returns the number of replicas. One that is in use, that is
pinned, or that Serve keeps anyway (`min_replicas`) never ends by this.
"""

import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from deployments.contract.model_spec import ModelSpec
from deployments.plan import cgroup
from deployments.plan.replica_report import LightSleep, SleepState
from deployments.replica.light_sleep import LightSleeper
from deployments.replica.own_actor import session_folder
from deployments.replica.own_scaling import to_zero_delay_s

SHORT_USED: Final = 0.9
"""The part of the machine's memory, or of the container's limit, from whose use on it is short. Ray
kills processes from 0.95 on, also such as work."""

RELIEVED_USED: Final = 0.85
"""The part below which it is no longer short, so that a load at the threshold does not make
processes end and start again."""

MAX_FAILURES: Final = 2
"""How often in a row a replica may fail to fall asleep before its process is no longer kept for it.
Once a probe's token may be the reason; a disk without room stays one."""


class MemoryPressure:
    """Whether memory is short."""

    def __init__(self, used: Callable[[], float] = cgroup.used_share) -> None:
        """Start without pressure.

        Args:
            used: Returns the part of the memory that is in use, from 0 to 1.
        """
        self._used = used
        self._is_short = False

    def is_short(self) -> bool:
        """Look at the memory, and return whether it is short."""
        self._is_short = self._used() >= (RELIEVED_USED if self._is_short else SHORT_USED)
        return self._is_short


class SleepersLine:
    """The processes of a node that sleep lightly and may end, the one that has slept longest first.

    Each holds a lock on a file whose name begins with the time. The kernel frees it however the
    process ends.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        """Start outside the line.

        Args:
            folder: Returns the folder of the files, which all processes of the node share.
        """
        self._find_folder = folder
        self._folder: Path | None = None
        self._own: Path | None = None
        self._descriptor: int | None = None

    def join(self, since_unix_s: float) -> None:
        """Stand in the line since a time, unless that is so already."""
        if self._folder is None:
            self._folder = self._find_folder()
        path = self._folder / f"{since_unix_s:017.3f}-{os.getpid()}-{id(self)}"
        if path == self._own:
            return
        self.leave()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}")  # until it is locked, so that none takes it away
        self._descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        draft.rename(path)
        self._own = path

    def leave(self) -> None:
        """Stand in the line no longer; do nothing outside it."""
        if self._own is not None and self._descriptor is not None:
            self._own.unlink(missing_ok=True)
            os.close(self._descriptor)
        self._own = self._descriptor = None

    def is_first(self) -> bool:
        """Return whether no other process has slept longer; take away what dead ones have left."""
        if self._own is None:
            return False
        for path in sorted(self._own.parent.glob("[!.]*")):
            if path == self._own:
                return True
            if _is_held(path):
                return False
        return False


def _is_held(path: Path) -> bool:
    """Return whether a living process holds the lock on a file; else take the file away."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        path.unlink(missing_ok=True)
        return False
    finally:
        os.close(descriptor)


class DeepSleep:
    """Whether the process of one replica stays while nobody uses its model."""

    def __init__(
        self,
        spec: ModelSpec,
        memory: MemoryPressure,
        to_zero_s: Callable[[], float | None] = to_zero_delay_s,
        line: SleepersLine | None = None,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        """Start with a process that stays.

        Args:
            spec: The model.
            memory: The memory of the machine or the container.
            to_zero_s: See `own_scaling.to_zero_delay_s`; asked each time, since a deploy may change
                it while the replica runs.
            line: The node's sleepers.
            now_unix_s: Returns the time.
        """
        self._spec = spec
        self._memory = memory
        self._to_zero_s = to_zero_s
        self._line = line or SleepersLine(lambda: session_folder("raystream-sleepers"))
        self._now_unix_s = now_unix_s
        self._has_to_go = False

    def light_after_s(self) -> float | None:
        """Return after how many seconds without use the replica sleeps lightly; None for never."""
        return self._spec.light_sleep_after_s(self._to_zero_s())

    @property
    def may_sleep_lightly(self) -> bool:
        """Whether it sleeps lightly, after a while or between its model's turns."""
        return self._spec.turn_group is not None or self.light_after_s() is not None

    def ends_instead(self) -> bool:
        """Return whether the process is to end instead of falling asleep: memory is short."""
        return self._to_zero_s() is not None and self._memory.is_short()

    def look(self, sleeper: LightSleeper) -> None:
        """Look whether memory is short and no other process has to end first."""
        is_short = self.ends_instead()
        if self._to_zero_s() is None or not _sleeps(sleeper):
            self.close()
            return
        self._line.join(sleeper.report.state_unix_s)
        self._has_to_go = is_short and self._line.is_first()

    def close(self) -> None:
        """Be no sleeper any more."""
        self._line.leave()
        self._has_to_go = False

    def is_kept(self, sleeper: LightSleeper) -> bool:
        """Return whether the process is to stay though nobody uses the model."""
        may_stay = self._to_zero_s() is not None and self.may_sleep_lightly
        return may_stay and sleeper.num_failures < MAX_FAILURES and not self.is_ending(sleeper)

    def is_ending(self, sleeper: LightSleeper) -> bool:
        """Return whether the process is to end now, without any further delay."""
        if self._to_zero_s() is None or sleeper.is_in_use:
            return False
        ends_unix_s = self._ends_unix_s(sleeper)
        is_due = ends_unix_s is not None and self._now_unix_s() >= ends_unix_s
        return is_due or sleeper.ends_instead or (self._has_to_go and _sleeps(sleeper))

    def report(self, sleeper: LightSleeper) -> LightSleep | None:
        """Return whether the replica sleeps, and when its process ends; None if it never sleeps."""
        if not self.may_sleep_lightly:
            return None
        return replace(
            sleeper.report,
            ends_unix_s=self._ends_unix_s(sleeper),
            is_ending=self.is_ending(sleeper),
        )

    def _ends_unix_s(self, sleeper: LightSleeper) -> float | None:
        """Return when the process has slept long enough; None while it does not sleep, or stays."""
        after_s = self._spec.entry.deep_sleep_after_s
        if after_s is None or self._to_zero_s() is None or not _sleeps(sleeper):
            return None
        return sleeper.report.state_unix_s + after_s


def _sleeps(sleeper: LightSleeper) -> bool:
    """Return whether a replica sleeps lightly, and nobody waits for it to wake."""
    return sleeper.state is SleepState.ASLEEP and not sleeper.is_in_use
