"""Watches the memory of a replica and of its device: history, thresholds and warnings.

A thread of its own reads the figures once a second (`deployments.device.memory_readers` has the
readers). This module only keeps and compares them, so the ingress, which imports no torch, can read
the reports.

A warning begins when a part of the memory in use reaches `WARN_FROM` and ends when it falls below
`WARN_BELOW`: a load that stays near one of the two is reported once.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0
"""Seconds between two samples: short enough to see a load or a burst, and far longer than one
sample takes."""

NUM_SAMPLES: Final = 600
"""Samples that are kept: ten minutes, which is longer than an operator needs to come and look. They
take about 0.2 MB."""

WARN_FROM: Final = 0.95
"""The part in use from which a warning begins. A plan fills at most 90 % of a share, so by then
half of what it leaves free is gone (`deployments.device.memory_budget.HEADROOM`)."""

WARN_BELOW: Final = 0.92
"""The part in use below which a warning ends."""

NUM_WARNINGS: Final = 16
"""Ended warnings that are kept."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What one sample shows, in bytes; None where the figure is not known.

    Attributes:
        device_total_bytes: The GPU's memory; on a CPU the container's limit, or the machine's.
        device_used_bytes: What all processes use of it.
        process_bytes: What this process uses of it: on a GPU with its CUDA context, on a CPU the
            resident set.
        allocated_bytes: Of torch's tensors on a GPU.
        reserved_bytes: What torch's allocator holds on a GPU, tensors and free blocks.
        peak_bytes: The most so far of `allocated_bytes`; on a CPU of `process_bytes`.
    """

    device_total_bytes: int | None = None
    device_used_bytes: int | None = None
    process_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None

    @property
    def fragmented_bytes(self) -> int | None:
        """What torch's allocator holds and no tensor uses; None on a CPU."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes


class Watched(StrEnum):
    """The memory that a threshold watches."""

    DEVICE = "device"
    """What all processes use of the device."""

    SHARE = "share"
    """What torch's allocator holds of the replica's share of a GPU, which caps it."""


@dataclass(frozen=True, slots=True)
class MemoryWarning:
    """Memory is short, or was.

    Attributes:
        of: Which memory.
        used_bytes: What was in use when the warning began.
        limit_bytes: The whole of it.
        began_unix_s: When it began.
        ended_unix_s: When it ended; None while it lasts.
    """

    of: Watched
    used_bytes: int
    limit_bytes: int
    began_unix_s: float
    ended_unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryHistory:
    """The samples, the oldest first, as columns of equal length.

    A column without any known value is None. See `MemoryUse` for what each holds.

    Attributes:
        unix_s: When each sample was taken.
    """

    unix_s: tuple[float, ...] = ()
    device_used_bytes: tuple[int | None, ...] | None = None
    process_bytes: tuple[int | None, ...] | None = None
    allocated_bytes: tuple[int | None, ...] | None = None
    reserved_bytes: tuple[int | None, ...] | None = None

    @classmethod
    def of(cls, samples: Iterable[tuple[float, MemoryUse]]) -> "MemoryHistory":
        """Return the samples' columns."""
        taken = list(samples)
        uses = [use for _, use in taken]
        return cls(
            tuple(round(unix_s, 1) for unix_s, _ in taken),
            _column(use.device_used_bytes for use in uses),
            _column(use.process_bytes for use in uses),
            _column(use.allocated_bytes for use in uses),
            _column(use.reserved_bytes for use in uses),
        )


def _column(values: Iterable[int | None]) -> tuple[int | None, ...] | None:
    column = tuple(values)
    return None if all(value is None for value in column) else column


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What a monitor knows.

    Attributes:
        use: The latest sample; all unknown before the first.
        share_bytes: The replica's share of a GPU; None on a CPU, where nothing caps a process.
        history: The samples.
        warnings: Those that last, and the latest that have ended; the oldest first.
        warn_from: The part in use from which a warning begins.
        warn_below: The part in use below which it ends.
    """

    use: MemoryUse = field(default_factory=MemoryUse)
    share_bytes: int | None = None
    history: MemoryHistory = field(default_factory=MemoryHistory)
    warnings: tuple[MemoryWarning, ...] = ()
    warn_from: float = WARN_FROM
    warn_below: float = WARN_BELOW


class MemoryMonitor:
    """Samples the memory at regular intervals on a thread of its own."""

    def __init__(
        self,
        read: Callable[[], MemoryUse],
        share_bytes: int | None = None,
        on_sample: Callable[[MemoryUse], object] = lambda use: None,
        on_warning: Callable[[MemoryWarning], object] = lambda warning: None,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """Prepare the thread; `start` starts it.

        The functions are called on the thread. None of them may hold the object that stops the
        monitor when it is deleted.

        Args:
            read: Reads the figures.
            share_bytes: See `MemoryReport`.
            on_sample: Called with each sample.
            on_warning: Called once when a warning begins, and once when it ends.
            unix_s: Returns the time in Unix seconds.
        """
        self._read = read
        self._share_bytes = share_bytes
        self._on_sample = on_sample
        self._on_warning = on_warning
        self._unix_s = unix_s
        self._samples: deque[tuple[float, MemoryUse]] = deque(maxlen=NUM_SAMPLES)
        self._lasting: Mapping[Watched, MemoryWarning] = {}
        self._ended: deque[MemoryWarning] = deque(maxlen=NUM_WARNINGS)
        self._has_failed = False
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def start(self) -> None:
        """Start the thread; it takes the first sample at once."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end. It is not waited for: a driver that hangs must stop nothing."""
        self._is_over.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; return whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def report(self) -> MemoryReport:
        """What is known now; callable in any thread."""
        with self._lock:
            samples = tuple(self._samples)
            warnings = (*self._ended, *self._lasting.values())
        return MemoryReport(
            samples[-1][1] if samples else MemoryUse(),
            self._share_bytes,
            MemoryHistory.of(samples),
            tuple(sorted(warnings, key=lambda warning: warning.began_unix_s)),
        )

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self.sample()
                self._has_failed = False
            except Exception:
                if not self._has_failed:
                    logger.warning("the memory in use can't be read", exc_info=True)
                self._has_failed = True
            self._is_over.wait(INTERVAL_S)

    def sample(self) -> None:
        """Read the figures once, keep them, and tell of warnings that begin or end.

        Raises:
            Exception: Any error of a reader or of what is told.
        """
        now_s, use = self._unix_s(), self._read()
        with self._lock:
            self._samples.append((now_s, use))
        self._on_sample(use)
        for of, used_bytes, limit_bytes in self._parts(use):
            self._compare(of, used_bytes, limit_bytes, now_s)

    def _parts(self, use: MemoryUse) -> Iterator[tuple[Watched, int, int]]:
        """Yield what is in use of each memory that is watched and known."""
        if use.device_used_bytes is not None and use.device_total_bytes:
            yield Watched.DEVICE, use.device_used_bytes, use.device_total_bytes
        if use.reserved_bytes is not None and self._share_bytes:
            yield Watched.SHARE, use.reserved_bytes, self._share_bytes

    def _compare(self, of: Watched, used_bytes: int, limit_bytes: int, now_s: float) -> None:
        """Begin or end the warning of a memory, if it has crossed a threshold."""
        lasting = self._lasting.get(of)
        part = used_bytes / limit_bytes
        if lasting is None and part >= WARN_FROM:
            warning = MemoryWarning(of, used_bytes, limit_bytes, now_s)
            with self._lock:
                self._lasting = {**self._lasting, of: warning}
        elif lasting is not None and part < WARN_BELOW:
            warning = replace(lasting, ended_unix_s=now_s)
            with self._lock:
                self._lasting = {key: each for key, each in self._lasting.items() if key != of}
                self._ended.append(warning)
        else:
            return
        self._on_warning(warning)
