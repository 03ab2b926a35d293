"""Copies a process's metrics to Ray's own, from where Ray's dashboard and Prometheus read them.

Ray adds the tags of application, deployment, replica and worker, and exports each name as
`ray_<name>`. A histogram is exported as its three series, which have the same names and labels as a
histogram's and are gauges to Ray. Ray's own histogram would not pass on the sum, only how many
values lie in each bucket, and its agent would record the middle of the bucket once for each.

Source: `record_histogram_aggregated_batch` in Ray's open_telemetry_metric_recorder.py
"""

import logging
import threading
from typing import Final, cast

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.metrics import Counter, Gauge

from deployments.contract.telemetry.metric_store import (
    Kind,
    Metric,
    MetricStore,
    Series,
    bucket_labels,
)

logger = logging.getLogger("ray.serve.raystream.metrics")

INTERVAL_S: Final = 2.0
"""How often the values are copied; Ray reports them every ten seconds."""


def own_deployment() -> str:
    """Return the name of this process's deployment; empty if Serve does not run it."""
    try:
        return str(serve.get_replica_context().deployment)
    except RayServeException:
        return ""


class RayMetrics:
    """Copies the values of a store to Ray's metrics, on a thread of its own."""

    def __init__(self, store: MetricStore, interval_s: float = INTERVAL_S) -> None:
        """Register the metrics and start the thread.

        Args:
            store: Holds the values.
            interval_s: Seconds between two copies.
        """
        self._store = store
        self._interval_s = interval_s
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._reported: dict[tuple[str, tuple[str, ...]], float] = {}
        for metric in store.metrics.values():
            self._register(metric)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def _register(self, metric: Metric) -> None:
        name, text = metric.name, metric.description
        keys = cast("tuple[str]", metric.labels)  # Ray means any number
        match metric.kind:
            case Kind.COUNTER:
                self._counters[name] = Counter(name, description=text, tag_keys=keys)
            case Kind.GAUGE:
                self._gauges[name] = Gauge(name, description=text, tag_keys=keys)
            case Kind.HISTOGRAM:
                for suffix, more in (("_bucket", ("le",)), ("_count", ()), ("_sum", ())):
                    self._gauges[name + suffix] = Gauge(
                        name + suffix, description=text, tag_keys=(*keys, *more)
                    )

    def _run(self) -> None:
        while not self._is_closing.wait(self._interval_s):
            self._try_to_copy()

    def _try_to_copy(self) -> None:
        try:
            self.copy()
        except Exception:
            logger.exception("the metrics can't be passed to Ray")

    def copy(self) -> None:
        """Pass the values of this moment to Ray."""
        for metric, series in self._store.series():
            for each in series:
                match metric.kind:
                    case Kind.COUNTER:
                        self._count(metric, each)
                    case Kind.GAUGE:
                        self._gauges[metric.name].set(each[1][0], tags=_tags(metric, each))
                    case Kind.HISTOGRAM:
                        self._set_buckets(metric, each)

    def _count(self, metric: Metric, series: Series) -> None:
        """Pass on an increase, which is all that a counter of Ray takes."""
        labels, (total,) = series
        increase = total - self._reported.get((metric.name, labels), 0.0)
        if increase > 0:
            self._counters[metric.name].inc(increase, tags=_tags(metric, series))
            self._reported[metric.name, labels] = total

    def _set_buckets(self, metric: Metric, series: Series) -> None:
        *at_most, total = series[1]
        tags = _tags(metric, series)
        for bound, count in zip(bucket_labels(metric), at_most, strict=True):
            self._gauges[metric.name + "_bucket"].set(count, tags={**tags, "le": bound})
        self._gauges[metric.name + "_count"].set(at_most[-1], tags=tags)
        self._gauges[metric.name + "_sum"].set(total, tags=tags)

    def close(self) -> None:
        """Pass the last values to Ray and end the thread; closing twice is harmless."""
        if not self._is_closing.is_set():
            self._is_closing.set()
            self._thread.join()
            self._try_to_copy()


def _tags(metric: Metric, series: Series) -> dict[str, str]:
    return dict(zip(metric.labels, series[0], strict=True))
