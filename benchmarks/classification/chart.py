"""Line plots over the number of users, as SVG, like those of the queue batcher's author."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """One plot.

    Attributes:
        title: The title.
        x_label: The label of the horizontal axis, which starts at 0.
        y_label: The label of the vertical axis, which starts at 0.
        lines: The points of each line, by the line's name.
    """

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Points]

    def figure(self) -> Figure:
        """Return the plot."""
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        for name, points in self.lines.items():
            axes.plot([x for x, _ in points], [y for _, y in points], "o-", label=name)
        axes.set(title=self.title, xlabel=self.x_label, ylabel=self.y_label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper")
        return figure

    def save(self, path: Path) -> None:
        """Write the plot as SVG."""
        self.figure().savefig(path, format="svg")
