"""What a run of turns has shown, beside the bars: a table, and a plot of who had the device."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.figure import Figure
from rich.table import Table

from benchmarks.turns.client import Answer, Question, Wait
from benchmarks.turns.foresight import least_loads

MAX_TURNS = 3
MAX_LOADS_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A time in which tokens of one model came, from the first one to the last."""

    model: str
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A figure, and the bar for it; empty means none."""

    what: str
    found: str
    bar: str = ""
    is_met: bool = True


class Report:
    """The figures of a run."""

    def __init__(self, answers: Sequence[Answer], expected: Mapping[Question, str | None]) -> None:
        """Read the answers.

        Args:
            answers: All of the run.
            expected: The texts of the same questions in an undisturbed run.
        """
        self.answers = answers
        self.turns = turns_of(answers)
        self.waits = [wait for each in answers for wait in each.waits()]
        self.num_whole = sum(each.is_whole for each in answers)
        self.num_equal = sum(
            each.is_whole and each.text == expected[each.question] for each in answers
        )
        self.most_turns = max(num_turns_during(wait, self.turns) for wait in self.waits)
        self._began_s = min(each.sent_s for each in answers)
        self._seconds = self.turns[-1].ended_s - self._began_s
        requests = [(each.question.model, each.sent_s) for each in answers]
        longest_s = max(seconds_to_turn(*each, self.turns) for each in requests)
        self.least_loads = least_loads(requests, longest_s)

    @property
    def num_loads(self) -> int:
        """How often a model began to run; the first one may have been loaded before."""
        return len(self.turns)

    @property
    def median_swap_s(self) -> float:
        """The median time from the last token of a turn to the first one of the next."""
        swaps_s = [late.began_s - early.ended_s for early, late in pairwise(self.turns)]
        return statistics.median(swaps_s or [0.0])

    @property
    def rows(self) -> list[Row]:
        """All figures."""
        longest = max(self.waits, key=lambda wait: wait.seconds)
        num_all, num_parked = len(self.answers), sum(wait.is_parked for wait in self.waits)
        worked_s = sum(turn.ended_s - turn.began_s for turn in self.turns)
        ratio = self.num_loads / self.least_loads
        is_whole = self.num_whole == num_all
        num_different = self.num_whole - self.num_equal
        return [
            Row("requests answered", f"{self.num_whole} of {num_all}", "all", is_whole),
            Row("errors", str(num_all - self.num_whole), "0", is_whole),
            Row(
                "texts equal to an undisturbed run's: yes, no",
                f"{self.num_equal}, {num_different}",
                "all",
                not num_different,
            ),
            Row("times that a stream was parked", str(num_parked)),
            Row(
                "longest wait, in turns of other models",
                str(self.most_turns),
                f"at most {MAX_TURNS}",
                self.most_turns <= MAX_TURNS,
            ),
            Row("longest wait", f"{longest.seconds:.1f} s"),
            Row("loads", f"{self.num_loads} ({self.num_loads - 1} swaps)"),
            Row("least possible loads", str(self.least_loads)),
            Row(
                "loads beside the least possible",
                f"{ratio:.2f}",
                f"at most {MAX_LOADS_RATIO:.0f}",
                ratio <= MAX_LOADS_RATIO,
            ),
            Row("seconds of a swap: median", f"{self.median_swap_s:.1f} s"),
            Row("part of the time in which a model worked", f"{worked_s / self._seconds:.0%}"),
            Row("seconds in all", f"{self._seconds:.0f} s"),
        ]

    def table(self, title: str = "turns") -> Table:
        """Return all figures."""
        table = Table(title=title)
        for column in ("what", "found", "bar", ""):
            table.add_column(column)
        for row in self.rows:
            verdict = "met" if row.is_met else "missed"
            table.add_row(row.what, row.found, row.bar, verdict if row.bar else "")
        return table

    def figure(self) -> Figure:
        """Return a plot of the model that had the device, above what waited meanwhile."""
        figure = Figure(figsize=(10, 7), layout="constrained")
        device, *plots = figure.subplots(3, 1, sharex=True, height_ratios=(1, 2, 2))
        models = sorted({each.question.model for each in self.answers})
        colors = {name: f"C{number}" for number, name in enumerate(models)}
        for turn in self.turns:
            span = (turn.began_s - self._began_s, turn.ended_s - turn.began_s)
            device.broken_barh(
                [span], (models.index(turn.model) - 0.4, 0.8), color=colors[turn.model]
            )
        device.set_yticks(range(len(models)), models)
        device.set(title="Has the device")
        for axes, is_parked, title in zip(
            plots, (False, True), ("Requests that wait", "Streams that are parked"), strict=True
        ):
            for name in models:
                chosen = [
                    wait for wait in self.waits if (wait.model, wait.is_parked) == (name, is_parked)
                ]
                axes.step(
                    *steps_of(chosen, self._began_s), where="post", color=colors[name], label=name
                )
            axes.set(title=title, ylim=(0, None))
            axes.legend()
        plots[-1].set(xlabel="seconds")
        return figure


def turns_of(answers: Sequence[Answer]) -> list[Turn]:
    """Return the turns in order: the longest spans in which only tokens of one model came."""
    times = sorted((time_s, each.question.model) for each in answers for time_s, _ in each.tokens())
    turns: list[Turn] = []
    for time_s, model in times:
        if turns and turns[-1].model == model:
            turns[-1] = Turn(model, turns[-1].began_s, time_s)
        else:
            turns.append(Turn(model, time_s, time_s))
    return turns


def num_turns_during(wait: Wait, turns: Sequence[Turn]) -> int:
    """Return how many turns of other models ran, if only in part, during a wait."""
    return sum(
        turn.model != wait.model and turn.began_s < wait.ended_s and turn.ended_s > wait.began_s
        for turn in turns
    )


def seconds_to_turn(model: str, sent_s: float, turns: Sequence[Turn]) -> float:
    """Return how long a request waited until its model had the device; 0 if it had it already.

    A request that came after the last turn of its model has failed: it waited for nothing.
    """
    began_s = (turn.began_s for turn in turns if turn.model == model and turn.ended_s > sent_s)
    return max(0.0, next(began_s, sent_s) - sent_s)


def steps_of(waits: Sequence[Wait], zero_s: float) -> tuple[list[float], list[int]]:
    """Return how many wait from each time on at which that changes.

    Args:
        waits: The waits.
        zero_s: The time from which others are counted, in seconds.
    """
    changes: Counter[float] = Counter()
    for wait in waits:
        changes[wait.began_s] += 1
        changes[wait.ended_s] -= 1
    times, numbers = [0.0], [0]
    for time_s in sorted(changes):
        times.append(time_s - zero_s)
        numbers.append(numbers[-1] + changes[time_s])
    return times, numbers
