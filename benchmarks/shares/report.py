"""What the measurement of shares found, beside the bars: a table and plots."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.figure import Figure
from rich.table import Table

from benchmarks.shares.client import Answer

MAX_TTFT_RATIO = 1.5


@dataclass(slots=True)
class Report:
    """What was found, in the order in which it was measured.

    Attributes:
        rows: What was measured, the figure, and the bar for it.
        are_met: Whether each bar is met.
        tokens: Each key's tokens, by the name of the case: times and totals.
        ttfts_ms: The times to first tokens in ascending order, by what was asked.
    """

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    are_met: list[bool] = field(default_factory=list)
    tokens: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)
    ttfts_ms: dict[str, list[float]] = field(default_factory=dict)

    def add(self, what: str, found: str, bar: str = "", *, is_met: bool = True) -> None:
        """Add a figure, and whether it meets its bar."""
        self.rows.append((what, found, bar))
        self.are_met.append(is_met)

    def add_refused(self, name: str, answers: Sequence[Answer]) -> None:
        """Add how many requests were refused, where none may be."""
        refused = sum(each.is_refused for each in answers)
        self.add(f"{name}: refused", str(refused), "0", is_met=not refused)

    def add_ttfts(
        self, name: str, answers: Sequence[Answer], end_s: float, beside: str = ""
    ) -> None:
        """Add times to first tokens, and compare their p95 with an earlier run's.

        Args:
            name: What was asked.
            answers: All of the run. One without a token counts, too: what starves is the slowest.
            end_s: When the run ended; see `Answer.ttft_s`.
            beside: The name of the earlier run; empty compares with none.
        """
        found = sorted(1e3 * each.ttft_s(end_s) for each in answers if not each.is_refused)
        self.ttfts_ms[name] = found
        p95 = percentile(found, 0.95)
        self.add(f"{name}: TTFT p50, p95", f"{statistics.median(found):.0f}, {p95:.0f} ms")
        self.add_refused(name, answers)
        if beside:
            ratio = p95 / percentile(self.ttfts_ms[beside], 0.95)
            bar = f"at most {MAX_TTFT_RATIO}"
            is_met = ratio <= MAX_TTFT_RATIO
            self.add(f"{name}: p95 beside {beside}", f"{ratio:.2f}", bar, is_met=is_met)

    def table(self) -> Table:
        """Return all figures."""
        table = Table(title="Shares and priorities")
        for column in ("what", "found", "bar", ""):
            table.add_column(column)
        for row, is_met in zip(self.rows, self.are_met, strict=True):
            table.add_row(*row, "" if not row[2] else "met" if is_met else "missed")
        return table

    def figure(self) -> Figure:
        """Return plots of each key's tokens over time, and of the times to first tokens."""
        figure = Figure(figsize=(6 * (len(self.tokens) + 1), 5), layout="constrained")
        *plots, last = figure.subplots(1, len(self.tokens) + 1, squeeze=False)[0]
        for axes, (case, keys) in zip(plots, self.tokens.items(), strict=True):
            for key, points in keys.items():
                axes.plot(*zip(*points, strict=True), label=f"key {key}")
            axes.set(title=f"Tokens by key, {case}", xlabel="seconds", ylabel="tokens")
            axes.legend()
        for name, found in self.ttfts_ms.items():
            parts = [(number + 1) / len(found) for number in range(len(found))]
            last.plot(found, parts, label=name)
        last.set(title="Time to a first token", xlabel="ms", ylabel="part of the requests")
        last.set_xscale("log")
        if self.ttfts_ms:
            last.legend()
        return figure


def percentile(ordered: Sequence[float], part: float) -> float:
    """Return the value that a part of the values is at most."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def points_of(answers: Sequence[Answer], began_s: float) -> list[tuple[float, float]]:
    """Return all tokens that had come by each whole second."""
    by_second: Counter[int] = Counter()
    for answer in answers:
        for time_s, num_tokens in answer.tokens():
            by_second[int(time_s - began_s) + 1] += num_tokens
    total, points = 0.0, [(0.0, 0.0)]
    for second in sorted(by_second):
        total += by_second[second]
        points.append((float(second), total))
    return points
