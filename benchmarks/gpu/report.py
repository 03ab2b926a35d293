"""The measured figures, as a table for the terminal and as markdown."""

from dataclasses import dataclass

from rich.table import Table

NOT_MEASURED = "not measured: no GPU was available"

COLUMNS = (
    "model",
    "sequences",
    "floor, ms",
    "step, ms",
    "times the floor",
    "without graphs, ms",
    "graphs",
    "memory, GiB",
    "planned, GiB",
    "engine, tok/s",
    "generate, one batch, tok/s",
    "generate, threads, tok/s",
)


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one model with one number of sequences; None if not measured.

    Attributes:
        model: The model's name.
        num_seqs: Sequences at once.
        floor_s: The least time that a decode step can take (see `floor`).
        step_s: Time of the engine's decode step.
        plain_step_s: The same, launched kernel by kernel.
        num_captured: Captured steps.
        peak_bytes: The most memory that the engine allocated, its weights included.
        planned_bytes: What a replica plans for the same.
        static_rate: Tokens per second of `generate` on one batch.
        threads_rate: Tokens per second of `generate` in threads.
    """

    model: str
    num_seqs: int
    floor_s: float | None = None
    step_s: float | None = None
    plain_step_s: float | None = None
    num_captured: int | None = None
    peak_bytes: int | None = None
    planned_bytes: int | None = None
    static_rate: float | None = None
    threads_rate: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of `COLUMNS`."""
        ratio = self.step_s / self.floor_s if self.step_s and self.floor_s else None
        return (
            self.model,
            str(self.num_seqs),
            _number(self.floor_s, 1000, 2),
            _number(self.step_s, 1000, 2),
            _number(ratio, 1, 2),
            _number(self.plain_step_s, 1000, 2),
            "-" if self.num_captured is None else str(self.num_captured),
            _number(self.peak_bytes, 2**-30, 2),
            _number(self.planned_bytes, 2**-30, 2),
            _number(self.num_seqs / self.step_s if self.step_s else None, 1, 0),
            _number(self.static_rate, 1, 0),
            _number(self.threads_rate, 1, 0),
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a whole run.

    Attributes:
        title: What was measured, and on what device.
        notes: Remarks on the whole run.
        rows: The figures; empty if nothing was measured.
    """

    title: str
    notes: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def table(self) -> Table:
        """A table for the terminal."""
        table = Table(title=self.title, caption="\n".join(self.notes))
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "model" else "right")
        for row in self.rows:
            table.add_row(*row.cells)
        return table

    @property
    def markdown(self) -> str:
        """The report as markdown."""
        lines = [f"# {self.title}", ""]
        if self.rows:
            rule = ("---", *("---:" for _ in COLUMNS[1:]))
            lines += [_line(COLUMNS), _line(rule), *(_line(row.cells) for row in self.rows)]
            lines.append("")
        lines += [f"- {note}" for note in self.notes]
        return "\n".join(lines) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{factor * value:,.{digits}f}"
