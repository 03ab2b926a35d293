"""The values of one process's metrics, and what defines a metric.

A `Metric` is defined once, in a table (`metric_table`, `serve_app.metrics`). Both ways out read the
same values: Ray's own metrics (`deployments.replica.ray_metrics`) and `GET /metrics` of the
ingress, which asks every process for a `Snapshot`. Recording is an addition to a number, so that
every token can be recorded.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Final, TypeVar, cast

MODEL_NAME: Final = "model_name"
"""The label that dashboards filter by: the model's id."""

VLLM_PREFIX: Final = "vllm_"
"""Ray allows no colon in a metric's name; vLLM's own names begin with `vllm:`."""


class Kind(StrEnum):
    """The kind of a metric, as Prometheus calls it."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of a metric.

    Attributes:
        name: Its name in Ray, which exports it as `ray_<name>`. A counter's ends in `_total`.
        kind: What its values are.
        description: One sentence for operators.
        labels: The names of its labels. Each process adds its deployment and replica.
        buckets: A histogram's upper bounds, ascending; an infinite one is implied.
        values: The values that the last label can have, if they are known. Series with these begin
            at zero, so that Prometheus sees the first increase.
    """

    name: str
    kind: Kind
    description: str
    labels: tuple[str, ...] = (MODEL_NAME,)
    buckets: tuple[float, ...] = ()
    values: tuple[str, ...] = ()

    @property
    def exposed_name(self) -> str:
        """The name in `GET /metrics`: vLLM's own for what vLLM has, too."""
        if self.name.startswith(VLLM_PREFIX):
            return f"vllm:{self.name.removeprefix(VLLM_PREFIX)}"
        return self.name


class Counter:
    """A number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add an amount."""
        self.value += amount

    def raise_to(self, total: float) -> None:
        """Take over a total that is counted elsewhere."""
        self.value = total

    def read(self) -> tuple[float, ...]:
        """Return the number."""
        return (self.value,)


class Gauge:
    """A number that may go up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        """Replace the number."""
        self.value = value

    def read(self) -> tuple[float, ...]:
        """Return the number."""
        return (self.value,)


class Histogram:
    """How many values fell into each bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count a value as often as `weight` says."""
        self._counts[bisect_left(self._bounds, value)] += weight
        self._sum += value * weight

    def read(self) -> tuple[float, ...]:
        """Return for each bound how many values are at most that, then their number and sum."""
        return (*accumulate(self._counts), self._sum)


Cell = Counter | Gauge | Histogram
CellT = TypeVar("CellT", Counter, Gauge, Histogram)

Series = tuple[tuple[str, ...], tuple[float, ...]]
"""The values of a metric's labels, and the numbers: one, or a histogram's (see its `read`)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The metrics of one process at one moment.

    Attributes:
        deployment: The process's deployment in Ray Serve.
        replica: Serve's id of the process.
        taken_s: When, in Unix seconds by the clock of the process's node.
        series: The series of each metric, by the metric's name.
    """

    deployment: str
    replica: str
    taken_s: float
    series: Mapping[str, tuple[Series, ...]]


class MetricStore:
    """The values of a process's metrics."""

    def __init__(self, metrics: Iterable[Metric], deployment: str = "", replica: str = "") -> None:
        """Start with every number at zero, and no series.

        Args:
            metrics: The definitions.
            deployment: The process's deployment in Ray Serve.
            replica: Serve's id of the process.
        """
        self.metrics = {metric.name: metric for metric in metrics}
        self._deployment = deployment
        self._replica = replica
        self._cells: dict[str, dict[tuple[str, ...], Cell]] = {name: {} for name in self.metrics}

    def counter(self, name: str, *labels: str) -> Counter:
        """Return the counter with these values of its labels; keep it where it is used often."""
        return self._cell(name, labels, Counter)

    def gauge(self, name: str, *labels: str) -> Gauge:
        """Return the gauge with these values of its labels."""
        return self._cell(name, labels, Gauge)

    def histogram(self, name: str, *labels: str) -> Histogram:
        """Return the histogram with these values of its labels."""
        return self._cell(name, labels, Histogram)

    def open_series(self, *labels: str) -> None:
        """Begin every series at zero whose last label has known values.

        Args:
            labels: The values of the labels before the last.
        """
        for metric in self.metrics.values():
            for value in metric.values:
                self.counter(metric.name, *labels, value)

    def _cell(self, name: str, labels: tuple[str, ...], kind: type[CellT]) -> CellT:
        cell = self._cells[name].get(labels)
        if cell is None:
            metric = self.metrics[name]
            assert len(labels) == len(metric.labels), f"{name} has the labels {metric.labels}"
            assert metric.kind == kind.__name__.lower(), f"{name} is a {metric.kind}"
            cell = Histogram(metric.buckets) if metric.kind is Kind.HISTOGRAM else kind()  # type: ignore[call-arg] # only a histogram has bounds
            self._cells[name][labels] = cell
        return cast("CellT", cell)

    def series(self) -> Iterator[tuple[Metric, tuple[Series, ...]]]:
        """Yield each metric with its series; callable in any thread."""
        for name, metric in self.metrics.items():
            # A copy: another thread may open a series meanwhile.
            cells = list(self._cells[name].items())
            yield metric, tuple((labels, cell.read()) for labels, cell in cells)

    def snapshot(self) -> Snapshot:
        """Return all values of this moment."""
        found = {metric.name: series for metric, series in self.series()}
        return Snapshot(self._deployment, self._replica, time.time(), found)


def bucket_labels(metric: Metric) -> tuple[str, ...]:
    """Return the values of a histogram's label `le`."""
    return (*(repr(float(bound)) for bound in metric.buckets), "+Inf")
