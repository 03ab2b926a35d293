"""`GET /metrics`: the metrics of all processes, as Prometheus reads them.

There is one series for each live replica and ingress, and no sums: a sum over live replicas would
fall when one of them ends.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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

from deployments.contract.telemetry.metric_store import Kind, Metric, Snapshot, bucket_labels
from serve_app.api.requests.context import ApiContext
from serve_app.backends.models.single_flight import SingleFlight
from serve_app.metrics import ALL

PROCESS_LABELS: Final = ("deployment", "replica")
"""The labels that every series has, with the same values as in Ray."""

IN_ORDER: Final = tuple(metric for _, metric in sorted(ALL.items()))


class MetricsApi:
    """Shows the metrics."""

    def __init__(self, context: ApiContext) -> None:
        self._snapshots = context.snapshots
        self._require = context.operators.require
        self._rendered: tuple[Sequence[Snapshot], bytes] = ((), b"")
        self._rendering = SingleFlight(self._render)
        self._thread = ThreadPoolExecutor(1, "metrics")  # the loop's own decode images

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
        return Response(await self._rendering.result(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _render(self) -> bytes:
        found = await self._snapshots.all()
        if found is not self._rendered[0]:
            # In a thread, as streams share the loop: 64 replicas take a tenth of a second.
            run = asyncio.get_running_loop().run_in_executor
            self._rendered = found, await run(self._thread, exposition, found)
        return self._rendered[1]


def exposition(snapshots: Sequence[Snapshot]) -> bytes:
    """Return the metrics in Prometheus's text format; the same for the same values."""
    return generate_latest(_Families(snapshots))


class _Families(Collector):
    """The metrics of all processes, as prometheus_client collects them."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Family]:
        for metric in IN_ORDER:
            family = _family(metric)
            for snapshot in self._snapshots:
                process = (snapshot.deployment, snapshot.replica)
                for labels, numbers in sorted(snapshot.series.get(metric.name, ())):
                    _add(family, metric, (*labels, *process), numbers)
            if family.samples:
                yield family


def _add(
    family: Family, metric: Metric, labels: tuple[str, ...], numbers: tuple[float, ...]
) -> None:
    if isinstance(family, HistogramMetricFamily):
        bounds = bucket_labels(metric)
        if len(numbers) == len(bounds) + 1:  # else another version has other buckets
            family.add_metric(labels, [*zip(bounds, numbers[:-1], strict=True)], numbers[-1])
    elif isinstance(family, CounterMetricFamily | GaugeMetricFamily) and len(numbers) == 1:
        family.add_metric(labels, *numbers)


def _family(metric: Metric) -> Family:
    name, labels = metric.exposed_name, (*metric.labels, *PROCESS_LABELS)
    match metric.kind:
        case Kind.COUNTER:
            return CounterMetricFamily(name, metric.description, labels=labels)
        case Kind.GAUGE:
            return GaugeMetricFamily(name, metric.description, labels=labels)
        case Kind.HISTOGRAM:
            return HistogramMetricFamily(name, metric.description, labels=labels)
