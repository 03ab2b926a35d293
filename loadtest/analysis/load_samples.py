"""The measurements at one load, for comparisons: raw samples, and rates per block of time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.analysis.bootstrap import block_rates
from loadtest.analysis.level_figures import samples_of, sent_in
from loadtest.analysis.request_table import Floats, RequestTable, build_table
from loadtest.analysis.spans import Span, measured_window
from loadtest.results.record import LevelRecord
from loadtest.results.run import Run

Load = tuple[int | None, float | None]
"""Users, or requests per second."""


@dataclass(frozen=True, slots=True)
class LoadSamples:
    """All repetitions of one load in one run, pooled.

    Attributes:
        levels: The repetitions, at least one.
        tables: The table of each level.
        windows: The window of each level.
    """

    levels: tuple[LevelRecord, ...]
    tables: tuple[RequestTable, ...]
    windows: tuple[Span, ...]

    @property
    def is_open_loop(self) -> bool:
        """Whether the load is a rate."""
        return self.levels[0].num_queues is None

    def samples(self, name: str) -> Floats:
        """Return a distribution's raw samples: [n], in the metric's unit."""
        return np.concatenate(
            [
                samples_of(table, name, sent_in(table, window))
                for table, window in zip(self.tables, self.windows, strict=True)
            ]
        )

    def is_failure(self) -> Floats:
        """Return 1 for each failed attempt and 0 for others, without cancelled ones: [n]."""
        outcomes = [
            (~table.is_success)[sent_in(table, window) & ~table.is_cancelled]
            for table, window in zip(self.tables, self.windows, strict=True)
        ]
        return np.concatenate(outcomes).astype(np.float64)

    def output_rates(self) -> Floats:
        """Return the tokens per second of each block of time: [num_blocks]."""
        return self._rates(lambda table: (table.event_s, table.event_tokens))

    def success_rates(self) -> Floats:
        """Return the successes per second of each block of time: [num_blocks]."""

        def ends(table: RequestTable) -> tuple[Floats, Floats]:
            ended_s = table.ended_s[table.is_success & ~table.is_warmup]
            return ended_s, np.ones_like(ended_s)

        return self._rates(ends)

    def _rates(self, events: Callable[[RequestTable], tuple[Floats, Floats]]) -> Floats:
        pairs = zip(self.tables, self.windows, strict=True)
        return np.concatenate(
            [block_rates(*events(table), span.started_s, span.ended_s) for table, span in pairs]
        )


def samples_by_load(run: Run) -> dict[Load, LoadSamples]:
    """Group a run's levels by load, in the order of the run."""
    by_load: dict[Load, list[LevelRecord]] = {}
    for level in run.levels:
        by_load.setdefault((level.num_queues, level.rate_per_s), []).append(level)
    return {load: _load_samples(run, levels) for load, levels in by_load.items()}


def _load_samples(run: Run, levels: Sequence[LevelRecord]) -> LoadSamples:
    tables = tuple(build_table(run.records_of(level)) for level in levels)
    windows = tuple(measured_window(*pair) for pair in zip(levels, tables, strict=True))
    return LoadSamples(tuple(levels), tables, windows)
