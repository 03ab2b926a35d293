"""Lines over numbers of users, as SVG: the plots that the queue batcher's author drew."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 40, 50
NUM_TICKS = 5
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8d5a97", "#c77d0a", "#4a4a4a")
DASHES = ("none", "7 3", "2 3")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """One plot.

    Attributes:
        title: What is seen.
        x_label: Of the horizontal axis, which begins at 0.
        y_label: Of the vertical one, which does too.
        lines: Points by the line's name.
    """

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Points]

    def svg(self) -> str:
        """Return the plot as a document of its own."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            _label(WIDTH / 2, 22, self.title, size=15),
            _label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, self.x_label),
            _label(18, HEIGHT / 2, self.y_label, turned=True),
            *self._grid(),
            *(self._line(i, name, points) for i, (name, points) in enumerate(self.lines.items())),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _grid(self) -> list[str]:
        top_x, top_y = self._ends
        found = list[str]()
        for i in range(NUM_TICKS + 1):
            x, y = top_x * i / NUM_TICKS, top_y * i / NUM_TICKS
            at_x, at_y = self._place(x, y)
            found += [
                _segment(at_x, TOP, at_x, HEIGHT - BOTTOM),
                _segment(LEFT, at_y, WIDTH - RIGHT, at_y),
                _label(at_x, HEIGHT - BOTTOM + 18, f"{x:g}"),
                _label(LEFT - 8, at_y + 4, f"{y:g}", anchor="end"),
            ]
        return found

    def _line(self, number: int, name: str, points: Points) -> str:
        colour, dash = COLOURS[number % 6], DASHES[number // 6 % 3]
        style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        path = " ".join("{:.1f},{:.1f}".format(*self._place(x, y)) for x, y in points)
        at_y = TOP + 10 + 20 * number
        start = WIDTH - RIGHT + 12
        return "\n".join(
            (
                f'<polyline points="{path}" {style}/>',
                f'<polyline points="{start},{at_y} {start + 26},{at_y}" {style}/>',
                _label(start + 32, at_y + 4, name, anchor="start"),
            )
        )

    def _place(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point lies on the page."""
        top_x, top_y = self._ends
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * x / top_x,
            HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / top_y,
        )

    @property
    def _ends(self) -> tuple[float, float]:
        """The numbers at the ends of both axes."""
        points = [point for points in self.lines.values() for point in points]
        return _round_up(max(x for x, _ in points)), _round_up(max(y for _, y in points))


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 2.5, 5 times a power of ten."""
    power = 1.0
    while power > value:
        power /= 10
    while power * 10 <= value:
        power *= 10
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value)


def _segment(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _label(
    x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12, turned: bool = False
) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{turn}>'
        f"{escape(text)}</text>"
    )
