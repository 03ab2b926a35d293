"""Service-level objectives: limits that each request meets or misses."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.analysis.metric import DISTRIBUTIONS, headline_name
from loadtest.analysis.request_table import REQUEST_METRICS, Bools, RequestTable


class ObjectiveError(ValueError):
    """An objective can't be parsed; the message says how to write it."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit in ms for one figure of each request, as `--slo ttft:2000` sets it."""

    name: str
    limit_ms: float

    def __str__(self) -> str:
        """Return the objective as used in sentences."""
        return f"{self.name} {self.limit_ms:g} ms"


def parse_objective(text: str) -> Objective:
    """Parse an objective such as "ttft:2000".

    Raises:
        ObjectiveError: The text is not `name:milliseconds`, or a request has no such figure.
    """
    name, colon, limit = text.strip().partition(":")
    if name not in REQUEST_METRICS:
        raise ObjectiveError(
            f"--slo {text!r}: there is no figure {name!r}; there are {', '.join(REQUEST_METRICS)}"
        )
    try:
        limit_ms = float(limit)
    except ValueError:
        limit_ms = float("nan")
    if not colon or not 0 < limit_ms < float("inf"):
        raise ObjectiveError(f"--slo {text!r}: write it as name:milliseconds, like {name}:2000")
    return Objective(name, limit_ms)


def meets_all(table: RequestTable, objectives: Sequence[Objective], *, is_open_loop: bool) -> Bools:
    """Return which requests succeeded and met every objective: [num_requests], bool.

    If a request lacks a figure, such as the TPOT of a single token, its objective counts as met.
    With a rate, TTFT and E2E are counted from the scheduled time.
    """
    met = table.is_success.copy()
    for objective in objectives:
        name = headline_name(objective.name, is_open_loop=is_open_loop)
        values_ms = table.figures[name] * DISTRIBUTIONS[name].ms_per_unit
        met &= np.isnan(values_ms) | (values_ms <= objective.limit_ms)
    return met
