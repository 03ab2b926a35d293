"""How far the start of a replica is: what it downloads and loads, as operators see it.

The replica counts (`StartProgress`), and others read a `StartReport`. It knows no Ray, so that the
folders that load models may use it; `start_board` carries reports out of the process.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock
from typing import Final

RATE_S: Final = 10.0
"""The time over which a rate is measured."""


class StartPhase(StrEnum):
    """What a replica does before it is ready."""

    PREPARING = "preparing"
    """It imports, reads configurations and plans its memory."""

    WAITING = "waiting"
    """It waits until another model, with which it takes turns, has given its memory back."""

    DOWNLOADING = "downloading"
    """It downloads the model's files from the hub."""

    LOADING = "loading"
    """It reads weights, and packs them for its device."""

    WARMING_UP = "warming up"
    """It runs the model for the first time."""


@dataclass(frozen=True, slots=True)
class StartReport:
    """How far a start is.

    Attributes:
        replica_id: As Serve names the replica.
        phase: What it does.
        phase_unix_s: Since when.
        unix_s: When this was reported.
        num_bytes: Bytes that were downloaded.
        total_bytes: Bytes of the files to download, or of the weights to load.
        bytes_per_s: The rate of the last seconds of a download; None before there is one.
        num_files: Files that are downloaded.
        total_files: Files to download, or that hold the weights (shards).
        num_tensors: Tensors that are loaded.
        total_tensors: Tensors to load; 0 until that is known.
    """

    replica_id: str
    phase: StartPhase
    phase_unix_s: float
    unix_s: float
    num_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float | None = None
    num_files: int = 0
    total_files: int = 0
    num_tensors: int = 0
    total_tensors: int = 0

    def __str__(self) -> str:
        """Return it in words, such as `downloading 1.20 of 15.23 GB, 3 of 8 files, 85 MB/s`."""
        files = "file" if self.total_files == 1 else "files"
        if self.phase is StartPhase.DOWNLOADING:
            rate = "" if self.bytes_per_s is None else f", {self.bytes_per_s / 1e6:.1f} MB/s"
            scale, unit = (1e9, "GB") if self.total_bytes >= 1e9 else (1e6, "MB")
            done, total = self.num_bytes / scale, self.total_bytes / scale
            return (
                f"{self.phase} {done:.2f} of {total:.2f} {unit}, "
                f"{self.num_files} of {self.total_files} {files}{rate}"
            )
        if self.phase is StartPhase.LOADING and self.total_tensors:
            size = f" ({self.total_bytes / 1e9:.2f} GB in {self.total_files} {files})"
            told = f"{self.phase} {self.num_tensors} of {self.total_tensors} tensors"
            return told + (size if self.total_files else "")
        return str(self.phase)

    @property
    def done(self) -> float | None:
        """The part of the phase that is done, 0 to 1; None if that is not known."""
        if self.phase is StartPhase.DOWNLOADING and self.total_bytes:
            return min(1.0, self.num_bytes / self.total_bytes)
        if self.phase is StartPhase.LOADING and self.total_tensors:
            return min(1.0, self.num_tensors / self.total_tensors)
        return None


class StartProgress:
    """Counts what a start has done; any thread may count, and any may ask."""

    def __init__(self, replica_id: str = "", now_s: Callable[[], float] = time.time) -> None:
        """Begin to prepare.

        Args:
            replica_id: As Serve names the replica.
            now_s: Returns the time, in Unix seconds.
        """
        self._replica_id = replica_id
        self._now_s = now_s
        self._lock = Lock()
        self.begin(StartPhase.PREPARING)

    def begin(self, phase: StartPhase, *, total_bytes: int = 0, total_files: int = 0) -> None:
        """Begin a phase; its counts are 0.

        Args:
            phase: The phase.
            total_bytes: See `StartReport`.
            total_files: See `StartReport`.
        """
        with self._lock:
            self._phase, self._phase_unix_s = phase, self._now_s()
            self._total_bytes, self._total_files = total_bytes, total_files
            self._num_bytes = self._num_files = self._num_tensors = self._total_tensors = 0
            self._marks: deque[tuple[float, int]] = deque([(self._phase_unix_s, 0)])

    def expect_tensors(self, total_tensors: int) -> None:
        """Say how many tensors there are to load."""
        with self._lock:
            self._total_tensors, self._num_tensors = total_tensors, 0

    def add(self, *, num_bytes: int = 0, num_files: int = 0, num_tensors: int = 0) -> None:
        """Count what has been done."""
        with self._lock:
            self._num_bytes += num_bytes
            self._num_files += num_files
            self._num_tensors += num_tensors

    def report(self) -> StartReport:
        """Return how far the start is."""
        with self._lock:
            now_s = self._now_s()
            while len(self._marks) > 1 and now_s - self._marks[1][0] >= RATE_S:
                self._marks.popleft()
            then_s, then_bytes = self._marks[0]
            rate = (self._num_bytes - then_bytes) / (now_s - then_s) if now_s > then_s else None
            self._marks.append((now_s, self._num_bytes))
            is_downloading = self._phase is StartPhase.DOWNLOADING
            return StartReport(
                self._replica_id,
                self._phase,
                self._phase_unix_s,
                now_s,
                self._num_bytes,
                self._total_bytes,
                rate if is_downloading else None,
                self._num_files,
                self._total_files,
                self._num_tensors,
                self._total_tensors,
            )
