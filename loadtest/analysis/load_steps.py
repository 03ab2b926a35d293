"""Groups the levels of a sweep by load.

All repetitions of a level form one step, whose figures are their medians.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from loadtest.analysis.metric import DISTRIBUTIONS, headline_name
from loadtest.results.summary import LevelFigures

MIN_ATTAINMENT = 0.95
"""A load is within capacity if this share of its attempts meets every objective (as p95)."""


@dataclass(frozen=True, slots=True)
class LoadStep:
    """All repetitions of one load.

    Attributes:
        load: The users, or the requests per second.
        levels: The repetitions, at least one.
    """

    load: float
    levels: tuple[LevelFigures, ...]

    @property
    def title(self) -> str:
        """The load's name."""
        return self.levels[0].title

    @property
    def is_open_loop(self) -> bool:
        """Whether the load is a rate."""
        return self.levels[0].is_open_loop

    def median_of(self, figure: Callable[[LevelFigures], float | None]) -> float | None:
        """Return the median of a figure over the repetitions that have it."""
        values = [value for level in self.levels if (value := figure(level)) is not None]
        return median(values) if values else None

    @property
    def output_per_s(self) -> float | None:
        """Tokens per second: of the steady state if there is one, else of the window."""
        return self.median_of(lambda level: (level.steady or level.window).output_tokens_per_s)

    def latency(self, name: str, statistic: str = "p95") -> float | None:
        """Return a statistic of a distribution; with a rate, counted from the scheduled time."""
        key = DISTRIBUTIONS[headline_name(name, is_open_loop=self.is_open_loop)].key
        return self.median_of(
            lambda level: (
                getattr(level.window.distributions[key], statistic)
                if key in level.window.distributions
                else None
            )
        )

    @property
    def is_carried(self) -> bool:
        """Whether enough attempts met the objectives, over all repetitions."""
        num_attempts = sum(level.num_attempts for level in self.levels)
        good = sum((level.slo_attainment or 0.0) * level.num_attempts for level in self.levels)
        return bool(num_attempts) and good / num_attempts >= MIN_ATTAINMENT


def load_steps(levels: Sequence[LevelFigures]) -> list[LoadStep]:
    """Group levels by load, the lightest first."""
    by_load: dict[float, list[LevelFigures]] = {}
    for level in levels:
        load = float(level.num_queues if level.num_queues is not None else level.rate_per_s or 0)
        by_load.setdefault(load, []).append(level)
    return [LoadStep(load, tuple(by_load[load])) for load in sorted(by_load)]
