"""What a server's processes hold over time: memory and open files, as figures and as a plot."""

import asyncio
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from matplotlib.figure import Figure

from tests.ray.serve_run import Server

INTERVAL_S = 2.0
MIB = 2**20
TITLES = {
    "ray::ServeReplica:raystream:Ingress": "ingress",
    "ray::ServeReplica:raystream:pydoc-chat": "replicas",
    "ray::ServeController": "controller",
    "gcs_server": "GCS",
    "raylet/raylet": "raylet",
}
"""What each kind of process is called, by a part of its command."""


@dataclass(frozen=True)
class Usage:
    """What the processes of one kind hold together.

    Attributes:
        rss_bytes: Resident memory.
        num_fds: Open file descriptors.
    """

    rss_bytes: int = 0
    num_fds: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.rss_bytes + other.rss_bytes, self.num_fds + other.num_fds)


def usage_of(server: Server) -> dict[str, Usage]:
    """Return what the processes of each kind hold now."""
    found: defaultdict[str, Usage] = defaultdict(Usage)
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            command = " ".join(process.cmdline()[:1])
            for part, kind in TITLES.items():
                if part in command:
                    found[kind] += Usage(process.memory_info().rss, process.num_fds())
    return dict(found)


@dataclass
class UsageLog:
    """What a server's processes held, at regular intervals.

    Attributes:
        samples: Pairs of the seconds since the start and the usage of each kind.
        events: Pairs of the seconds since the start and what was done to the server.
    """

    server: Server
    samples: list[tuple[float, dict[str, Usage]]] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    _started_s: float = field(default_factory=time.monotonic)

    async def sample_for_ever(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.samples.append((self._now_s(), usage_of(self.server)))
            await asyncio.sleep(INTERVAL_S)

    def note(self, event: str) -> None:
        """Note what is done to the server now."""
        self.events.append((self._now_s(), event))

    def plot(self, path: Path) -> None:
        """Draw the resident memory of each kind over time, and the events, into a PNG file."""
        figure = Figure(figsize=(10, 5), dpi=100, layout="constrained")
        axes = figure.subplots()
        for kind in TITLES.values():
            seconds = [at_s for at_s, usage in self.samples if kind in usage]
            sizes = [usage[kind].rss_bytes / MIB for _, usage in self.samples if kind in usage]
            axes.plot(seconds, sizes, label=kind)
        for at_s, event in self.events:
            axes.axvline(at_s, color="gray", linewidth=0.6, linestyle=":")
            axes.text(at_s, 0, f" {event}", rotation=90, fontsize=7, va="bottom", ha="right")
        axes.set_xlabel("seconds")
        axes.set_ylabel("resident memory, MiB")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="center right")
        figure.savefig(path)

    def _now_s(self) -> float:
        return time.monotonic() - self._started_s
