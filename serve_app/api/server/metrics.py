"""`GET /metrics`: the metrics of all processes, as Prometheus reads them.

There is one series for each live replica and ingress, and no sums: a sum over live replicas would
fall when one of them ends.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from collections.abc import Iterator, Sequence
from typing import Final

from fastapi import APIRouter, Depends, Response
from prometheus_client import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from deployments.contract.metric_store import Kind, Metric, Snapshot, bucket_labels
from serve_app.api.intake.context import ApiContext
from serve_app.metrics import ALL

PROCESS_LABELS: Final = ("deployment", "replica")
"""The labels that every series has, with the same values as in Ray."""

IN_ORDER: Final = tuple(metric for _, metric in sorted(ALL.items()))


class MetricsApi:
    """Shows the metrics."""

    def __init__(self, context: ApiContext) -> None:
        self._snapshots = context.snapshots
        self._require = context.operators.require
        self._exposition = Exposition()
        self._rendered: tuple[Sequence[Snapshot], bytes] = ((), b"")

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(tags=["operate"], dependencies=[Depends(self._require)])
        router.add_api_route(
            "/metrics",
            self.show,
            summary="Show the metrics to Prometheus",
            response_class=Response,
            responses={200: {"content": {CONTENT_TYPE_PLAIN_0_0_4: {}}}},
        )
        return router

    async def show(self) -> Response:
        """Show the metrics of all processes, at most a second old."""
        found = await self._snapshots.all()
        if found is not self._rendered[0]:
            self._rendered = found, self._exposition.render(found)
        return Response(self._rendered[1], media_type=CONTENT_TYPE_PLAIN_0_0_4)


SeriesKey = tuple[str, tuple[str, ...], tuple[str, str]]
"""A metric's name, the values of its labels, and those of `PROCESS_LABELS`."""


class Exposition:
    """Writes metrics in Prometheus's text format.

    prometheus_client writes each series once; from then on, only its numbers are written anew. To
    write everything anew would take ten times as long.
    """

    def __init__(self) -> None:
        self._heads = {metric.name: _lines_of(_family(metric))[:2] for metric in IN_ORDER}
        self._names: dict[SeriesKey, list[str]] = {}

    def render(self, snapshots: Sequence[Snapshot]) -> bytes:
        """Return the text; the same for the same values, whatever came before."""
        named: dict[SeriesKey, list[str]] = {}
        text: list[str] = []
        for metric in IN_ORDER:
            lines = list(self._series(metric, snapshots, named))
            if lines:
                text += self._heads[metric.name]
                text += lines
        self._names = named  # without the series of processes that are gone
        return "".join(text).encode()

    def _series(
        self, metric: Metric, snapshots: Sequence[Snapshot], named: dict[SeriesKey, list[str]]
    ) -> Iterator[str]:
        for snapshot in snapshots:
            process = (snapshot.deployment, snapshot.replica)
            for labels, numbers in sorted(snapshot.series.get(metric.name, ())):
                key = (metric.name, labels, process)
                names = self._names.get(key)
                if names is None:
                    names = _names_of(metric, (*labels, *process))
                named[key] = names
                if metric.kind is Kind.HISTOGRAM:
                    numbers = (*numbers[:-1], *numbers[-2:])  # the last bucket is the count
                if len(numbers) == len(names):  # else another version has other buckets
                    for name, number in zip(names, numbers, strict=True):
                        yield f"{name}{_written(number)}\n"


def _written(number: float) -> str:
    text: str = floatToGoString(number)  # type: ignore[no-untyped-call] # left untyped
    return text


def _names_of(metric: Metric, labels: tuple[str, ...]) -> list[str]:
    """Return how each line of a series begins, up to its number."""
    family = _family(metric)
    if isinstance(family, HistogramMetricFamily):
        family.add_metric(labels, [(bound, 0) for bound in bucket_labels(metric)], 0)
    elif isinstance(family, CounterMetricFamily | GaugeMetricFamily):
        family.add_metric(labels, 0)
    return [line[: line.rindex(" ") + 1] for line in _lines_of(family)[2:]]


def _lines_of(family: Family) -> list[str]:
    return generate_latest(_Only(family)).decode().splitlines(keepends=True)


class _Only(Collector):
    """One family of metrics."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterator[Family]:
        yield self._family


def _family(metric: Metric) -> Family:
    name, labels = metric.exposed_name, (*metric.labels, *PROCESS_LABELS)
    match metric.kind:
        case Kind.COUNTER:
            return CounterMetricFamily(name, metric.description, labels=labels)
        case Kind.GAUGE:
            return GaugeMetricFamily(name, metric.description, labels=labels)
        case Kind.HISTOGRAM:
            return HistogramMetricFamily(name, metric.description, labels=labels)
