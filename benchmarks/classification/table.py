"""Figures as a table for the terminal and as CSV."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table

Cell = str | int | float


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of one part of the benchmark.

    Attributes:
        name: The name of its files.
        title: What was measured, and on what.
        columns: The names of the columns.
        rows: One cell per column; the CSV file has the numbers in full precision.
        notes: Explanations for the reader.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    @property
    def table(self) -> Table:
        """A table for the terminal."""
        table = Table(title=self.title, caption="\n".join(self.notes))
        for column in self.columns:
            justify: Literal["left", "right"] = "left" if column in _words(self) else "right"
            table.add_column(column, justify=justify, no_wrap=justify == "left")
        for row in self.rows:
            table.add_row(*(_text(cell) for cell in row))
        return table

    def write_csv(self, folder: Path) -> Path:
        """Write the columns' names and the rows; return the file."""
        path = folder / f"{self.name}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([self.columns, *self.rows])
        return path


def _words(figures: Figures) -> set[str]:
    """Return the columns that contain only words."""
    cells = zip(*figures.rows, strict=True)
    return {
        column
        for column, values in zip(figures.columns, cells, strict=False)
        if all(isinstance(value, str) for value in values)
    }


def _text(cell: Cell) -> str:
    """Format a number with about three significant digits."""
    if not isinstance(cell, float):
        return str(cell)
    return (
        f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"
    )
