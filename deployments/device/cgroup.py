"""A container's limits on memory and cores (cgroup v2).

`psutil` and `sched_getaffinity` report the whole node; only the cgroup has a pod's limits.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, memory.max and cpu.max.
"""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where a container sees its own limits."""


def free_bytes(cgroup: Path = CGROUP) -> int | None:
    """Return the bytes below the memory limit, or None without a limit.

    Inactive cached file pages count as free, as in Kubernetes: the kernel reclaims them first.
    """
    limit = _read(cgroup / "memory.max")
    if not limit or limit == ["max"]:
        return None
    stat = _read(cgroup / "memory.stat")
    values = dict(zip(stat[::2], stat[1::2], strict=True))
    used = int(_read(cgroup / "memory.current")[0]) - int(values.get("inactive_file", 0))
    return max(0, int(limit[0]) - used)


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
