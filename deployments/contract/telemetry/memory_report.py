"""What a replica reports of the memory in use: samples, history and warnings."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

WARN_FROM: Final = 0.95
"""The part in use from which a warning begins. A plan fills at most 90 % of a share, so by then
half of what it leaves free is gone (`deployments.plan.memory_budget.HEADROOM`)."""


WARN_BELOW: Final = 0.92
"""The part in use below which a warning ends."""


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
    def held_bytes(self) -> int | None:
        """What this process uses; what torch holds of a GPU whose driver doesn't say."""
        return self.reserved_bytes if self.process_bytes is None else self.process_bytes

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
