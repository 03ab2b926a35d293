"""A chart as a plotly figure: plain data for its script, with one look for all charts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.analysis.request_table import Floats
from loadtest.results.summary import LevelFigures

COLOURS = (
    "#3b6fb6", "#d9822b", "#2f8f5b", "#b5477f", "#7a5fb0", "#8a6d3b", "#2a9fb5", "#6b7280",
)  # fmt: skip
BLUE, ORANGE, GREY = COLOURS[0], COLOURS[1], "#c3c9d2"


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart of the page.

    Attributes:
        name: The id of the chart's element.
        title: The heading above the chart.
        text: What the chart shows and how to read it, under the heading.
        traces: Plotly's data.
        layout: Plotly's layout.
    """

    name: str
    title: str
    text: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]


def layout_of(height: int, **more: Any) -> dict[str, Any]:
    """Return a layout of this height in pixels, with the look of all charts."""
    return {
        "height": height,
        "margin": {"l": 70, "r": 30, "t": 30, "b": 55},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#1f2933"},
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        **more,
    }


def axis_of(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis with a title, which includes the unit."""
    return {
        "title": {"text": title},
        "gridcolor": "#e8ebef",
        "zerolinecolor": "#c3c9d2",
        "linecolor": "#c3c9d2",
        **more,
    }


def rounded(values: Floats, digits: int = 3) -> list[float]:
    """Return values [n] as rounded plain numbers."""
    numbers: list[float] = np.round(values, digits).tolist()
    return numbers


def token_word(levels: Sequence[LevelFigures]) -> str:
    """Return what the levels count: "tokens" or "chunks"."""
    return levels[0].token_word if levels else "tokens"
