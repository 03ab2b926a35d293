"""Draws the memory of replicas over time, with the thresholds of warnings, as a PNG file.

All panels show the same time, from the oldest sample on. The legends tell the newest values: on a
CPU a replica's own line can lie close to zero, far below that of all processes.

It runs in a worker process that has neither a display nor torch.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from io import BytesIO
from typing import Final

from matplotlib.axes import Axes
from matplotlib.dates import DateFormatter
from matplotlib.figure import Figure

from deployments.device.memory_budget import GIB
from deployments.device.monitor import Watched
from deployments.replica_report import ReplicaReport

DPI: Final = 100
WIDTH_INCHES: Final = 10
PANEL_INCHES: Final = 2.8
MIN_SPAN_S: Final = 60.0
"""The least time that is shown."""

MAX_NUM_PANELS: Final = 12
"""Replicas in one plot; the title counts the others."""

LINES: Final = (
    ("device_used_bytes", "device, all processes", "#888888"),
    ("process_bytes", "this replica's process", "#3b6fb6"),
    ("reserved_bytes", "reserved by its allocator", "#d9822b"),
    ("allocated_bytes", "in its tensors", "#2f8f5b"),
)
"""The columns of the history that are drawn, with their labels and colours."""

WARNING_COLOUR: Final = "#b3261e"


def draw_history(replicas: Sequence[tuple[str, ReplicaReport]]) -> bytes:
    """Return a PNG file with a panel for each replica.

    Args:
        replicas: The replicas' reports, each with its model's id.
    """
    shown = replicas[:MAX_NUM_PANELS]
    num_panels = max(1, len(shown))
    figure = Figure(
        figsize=(WIDTH_INCHES, 0.8 + PANEL_INCHES * num_panels), dpi=DPI, layout="constrained"
    )
    panels = figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0]
    num_hidden = len(replicas) - len(shown)
    figure.suptitle("Memory of the replicas" + (f" ({num_hidden} more)" if num_hidden else ""))
    for axes, (model_id, report) in zip(panels, shown, strict=False):
        _draw_replica(axes, model_id, report)
    _set_times(panels[-1], [report for _, report in shown])
    if not shown:
        panels[0].text(0.5, 0.5, "no replica runs", ha="center", va="center")
        panels[0].set_axis_off()
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw_replica(axes: Axes, model_id: str, report: ReplicaReport) -> None:
    history = report.memory.history
    times = [_time(unix_s) for unix_s in history.unix_s]
    for name, label, colour in LINES:
        column: tuple[int | None, ...] | None = getattr(history, name)
        if column is not None:
            gib = [float("nan") if value is None else value / GIB for value in column]
            newest = f": {gib[-1]:.2f} GiB" if column and column[-1] is not None else ""
            axes.plot(times, gib, label=label + newest, color=colour)  # type: ignore[arg-type] # dates too
    _draw_thresholds(axes, report)
    axes.set_title(
        f"{model_id}: replica {report.replica_id} on {report.device}, {report.node}", fontsize=10
    )
    axes.set_ylabel("GiB")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)


def _set_times(axes: Axes, reports: Sequence[ReplicaReport]) -> None:
    """Set the time that all panels show, and its labels, by the lowest of them."""
    histories = [report.memory.history.unix_s for report in reports if report.memory.history.unix_s]
    if histories:
        last_s = max(unix_s[-1] for unix_s in histories)
        first_s = min(last_s - MIN_SPAN_S, *(unix_s[0] for unix_s in histories))
        axes.set_xlim(_time(first_s), _time(last_s))  # type: ignore[arg-type] # dates too
        axes.set_xlabel(f"UTC, {_time(last_s):%Y-%m-%d}")
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S"))  # type: ignore[no-untyped-call] # matplotlib leaves it untyped


def _draw_thresholds(axes: Axes, report: ReplicaReport) -> None:
    """Draw where warnings begin, and the times at which memory was short."""
    memory = report.memory
    limits = {
        Watched.DEVICE: memory.use.device_total_bytes,
        Watched.SHARE: memory.share_bytes,
    }
    for (of, limit_bytes), style in zip(limits.items(), ("--", ":"), strict=True):
        if limit_bytes:
            axes.axhline(
                memory.warn_from * limit_bytes / GIB,
                label=f"warning: {memory.warn_from:.0%} of the {of}",
                color=WARNING_COLOUR,
                linestyle=style,
                linewidth=1,
            )
    if not memory.history.unix_s:
        return
    first_s, last_s = memory.history.unix_s[0], memory.history.unix_s[-1]
    for warning in memory.warnings:
        ended_s = last_s if warning.ended_unix_s is None else warning.ended_unix_s
        if ended_s > first_s:
            begin, end = _time(max(first_s, warning.began_unix_s)), _time(ended_s)
            axes.axvspan(begin, end, color=WARNING_COLOUR, alpha=0.12)  # type: ignore[arg-type] # dates too


def _time(unix_s: float) -> datetime:
    return datetime.fromtimestamp(unix_s, UTC)
