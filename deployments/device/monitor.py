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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from deployments.contract.telemetry.memory_report import (
    WARN_BELOW,
    WARN_FROM,
    MemoryHistory,
    MemoryReport,
    MemoryUse,
    MemoryWarning,
    Watched,
)

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0
"""Seconds between two samples: short enough to see a load or a burst, and far longer than one
sample takes."""

NUM_SAMPLES: Final = 600
"""Samples that are kept: ten minutes, which is longer than an operator needs to come and look. They
take about 0.2 MB."""


NUM_WARNINGS: Final = 16
"""Ended warnings that are kept."""


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
