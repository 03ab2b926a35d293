"""A container's limits on memory and cores (cgroup v2).

`psutil` and `sched_getaffinity` report the whole node; only the cgroup has a pod's limits.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, memory.max and cpu.max.
"""

from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
"""Where a container sees its own limits."""


@dataclass(frozen=True, slots=True)
class ContainerMemory:
    """A container's memory.

    Attributes:
        limit_bytes: The most that it may use.
        used_bytes: What it uses. Inactive cached file pages count as free, as in Kubernetes: the
            kernel reclaims them first.
    """

    limit_bytes: int
    used_bytes: int


def free_bytes(cgroup: Path = CGROUP) -> int | None:
    """Return the bytes below the memory limit, or None without a limit."""
    found = memory(cgroup)
    return None if found is None else max(0, found.limit_bytes - found.used_bytes)


def memory(cgroup: Path = CGROUP) -> ContainerMemory | None:
    """Return the container's memory, or None without a limit."""
    limit = _read(cgroup / "memory.max")
    if not limit or limit == ["max"]:
        return None
    stat = _read(cgroup / "memory.stat")
    values = dict(zip(stat[::2], stat[1::2], strict=True))
    used = int(_read(cgroup / "memory.current")[0]) - int(values.get("inactive_file", 0))
    return ContainerMemory(int(limit[0]), used)


def available_bytes() -> int:
    """Return the bytes that are free now, on the machine and in the container."""
    available = int(psutil.virtual_memory().available)
    allowed = free_bytes()
    return available if allowed is None else min(available, allowed)


def total_bytes(cgroup: Path = CGROUP) -> int:
    """Return the bytes of the machine's memory, or of the part that the container may use."""
    total, container = int(psutil.virtual_memory().total), memory(cgroup)
    return total if container is None else min(total, container.limit_bytes)


def used_share() -> float:
    """Return the part that is in use of the machine's memory, or of the container's limit."""
    return 1 - available_bytes() / total_bytes()


def num_cores(cgroup: Path = CGROUP) -> float | None:
    """Return the limit on CPU time as a number of cores, or None without a limit."""
    limit = _read(cgroup / "cpu.max")
    if not limit or limit[0] == "max":
        return None
    quota, period = map(int, limit)
    return quota / period


def _read(file: Path) -> list[str]:
    """Return a file's words; none if there is no file, as in the root cgroup and outside Linux."""
    try:
        return file.read_text().split()
    except OSError:
        return []
