"""Describes the machine that sends the load, for readers of the results."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Final

_PACKAGES: Final = ("aiohttp", "uvloop")


def describe_machine() -> dict[str, Any]:
    """Return the machine's figures and the versions of the HTTP libraries."""
    return {
        "hostname": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        **{name: metadata.version(name) for name in _PACKAGES},
    }


def _cpu_name() -> str:
    """Return the processor's name from Linux, or else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
