"""What a server's processes hold over time: memory and open files, as figures and as a plot."""

import asyncio
import json
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil
from matplotlib.figure import Figure

from tests.ray.serve_run import Server

INTERVAL_S = 2.0
MIB = 2**20
COLORS = ("black", "tab:purple", "tab:gray")
"""Of the events, in the order of their names."""

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
    """What the processes of one kind hold together."""

    rss_bytes: int = 0  # resident memory
    num_fds: int = 0  # open file descriptors
    largest_rss_bytes: int = 0  # of the process that holds the most

    @classmethod
    def of(cls, process: psutil.Process) -> Self:
        """Return what one process holds."""
        rss_bytes = process.memory_info().rss
        return cls(rss_bytes, process.num_fds(), rss_bytes)

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.rss_bytes + other.rss_bytes,
            self.num_fds + other.num_fds,
            max(self.largest_rss_bytes, other.largest_rss_bytes),
        )


def usage_of(server: Server) -> dict[str, Usage]:
    """Return what the processes of each kind hold now."""
    found: defaultdict[str, Usage] = defaultdict(Usage)
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            command = " ".join(process.cmdline()[:1])
            for part, kind in TITLES.items():
                if part in command:
                    found[kind] += Usage.of(process)
    return dict(found)


@dataclass
class UsageLog:
    """What a server's processes held, at regular intervals."""

    server: Server
    # Pairs of the seconds since the start and the usage of each kind.
    samples: list[tuple[float, dict[str, Usage]]] = field(default_factory=list)
    # Pairs of the seconds since the start and what was done to the server.
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

    def largest_in_halves(self, kind: str) -> tuple[int, int]:
        """Return the largest resident memory of a process in the first and in the second half."""
        largest = [usage[kind].largest_rss_bytes for _, usage in self.samples if kind in usage]
        middle = len(largest) // 2
        return max(largest[:middle]), max(largest[middle:])

    def write(self, path: Path) -> None:
        """Write what `plot` draws into a JSON file, so that it can be drawn again."""
        samples = [
            (at_s, {kind: each.rss_bytes for kind, each in usage.items()})
            for at_s, usage in self.samples
        ]
        path.write_text(json.dumps({"events": self.events, "rss_bytes": samples}))

    def plot(self, path: Path) -> None:
        """Draw the resident memory of each kind over time, and the events, into a PNG file."""
        figure = Figure(figsize=(10, 7), dpi=100, layout="constrained")
        figure.suptitle("Resident memory in MiB, over minutes")
        upper, lower = figure.subplots(2, sharex=True)
        for axes, kinds in ((upper, {"replicas"}), (lower, set(TITLES.values()) - {"replicas"})):
            for kind in sorted(kinds):
                drawn = [(at_s / 60, usage[kind]) for at_s, usage in self.samples if kind in usage]
                sizes = [usage.rss_bytes / MIB for _, usage in drawn]
                axes.plot([at_min for at_min, _ in drawn], sizes, label=kind)
            for event, color in zip(
                sorted({name for _, name in self.events}), COLORS, strict=False
            ):
                moments = [at_s / 60 for at_s, name in self.events if name == event]
                drawing = axes.get_xaxis_transform()  # from the lower edge to the upper one
                axes.vlines(
                    moments,
                    0,
                    1,
                    color,
                    linestyle="--",
                    linewidth=0.9,
                    label=event,
                    transform=drawing,
                )
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        figure.savefig(path)

    def _now_s(self) -> float:
        return time.monotonic() - self._started_s
