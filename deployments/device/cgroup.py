"""What a container lets this process use of the machine's memory and cores (cgroup v2).

`psutil` and `sched_getaffinity` tell of the whole node; a pod's limits stand here alone.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, memory.max and cpu.max.
"""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where a container sees its own limits."""


def free_bytes(cgroup: Path = CGROUP) -> int | None:
    """Return the bytes below the memory limit, or None without a limit.

    Cached file pages that the kernel would give up first count as free, as Kubernetes counts them.
    """
    limit = _read(cgroup / "memory.max")
    if not limit or limit == ["max"]:
        return None
    stat = _read(cgroup / "memory.stat")
    values = dict(zip(stat[::2], stat[1::2], strict=True))
    used = int(_read(cgroup / "memory.current")[0]) - int(values.get("inactive_file", 0))
    return max(0, int(limit[0]) - used)


def num_cores(cgroup: Path = CGROUP) -> float | None:
    """Return how many cores' time the process may take, or None without a limit."""
    limit = _read(cgroup / "cpu.max")
    if not limit or limit[0] == "max":
        return None
    quota, period = map(int, limit)
    return quota / period


def _read(file: Path) -> list[str]:
    """Return a file's words; none where there is no such file, as on the root and outside Linux."""
    try:
        return file.read_text().split()
    except OSError:
        return []
