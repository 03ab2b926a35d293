from collections.abc import Mapping, Sequence

import pytest

from deployments.contract.telemetry.metric_store import Kind, Metric, MetricStore
from deployments.contract.telemetry.metric_table import GENERATOR, POOLER
from deployments.replica import ray_metrics
from deployments.replica.ray_metrics import RayMetrics

ENDS = Metric("vllm_ends_total", Kind.COUNTER, "Ends.", ("model_name", "reason"))
LOAD = Metric("vllm_load", Kind.GAUGE, "Load.")
TIMES = Metric("vllm_times_seconds", Kind.HISTOGRAM, "Times.", buckets=(1.0, 2.5))
NEVER_S = 3600.0


class RecordedMetric:
    """Replaces a metric of Ray; all of them share one record."""

    values: dict[tuple[str, ...], list[float]]

    def __init__(self, name: str, *, description: str, tag_keys: Sequence[str]) -> None:
        assert description.endswith(".")
        self._name = name
        self._tag_keys = tag_keys

    def record(self, value: float, tags: Mapping[str, str]) -> None:
        assert tuple(tags) == tuple(self._tag_keys)
        self.values.setdefault((self._name, *tags.values()), []).append(value)

    inc = set = record


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], list[float]]:
    RecordedMetric.values = {}
    for kind in ("Counter", "Gauge"):
        monkeypatch.setattr(ray_metrics, kind, RecordedMetric)
    return RecordedMetric.values


@pytest.fixture
def store() -> MetricStore:
    return MetricStore([ENDS, LOAD, TIMES])


def test_a_counter_passes_on_increases_only(
    recorded: dict[tuple[str, ...], list[float]], store: MetricStore
) -> None:
    passing = RayMetrics(store, NEVER_S)
    ends = store.counter("vllm_ends_total", "m", "stop")
    passing.copy()
    ends.inc(3)
    passing.copy()
    passing.copy()
    ends.inc()
    passing.close()
    assert recorded == {("vllm_ends_total", "m", "stop"): [3, 1]}


def test_a_histogram_is_its_three_series(
    recorded: dict[tuple[str, ...], list[float]], store: MetricStore
) -> None:
    passing = RayMetrics(store, NEVER_S)
    store.histogram("vllm_times_seconds", "m").observe(2.0, 3)
    passing.close()
    assert recorded == {
        ("vllm_times_seconds_bucket", "m", "1.0"): [0],
        ("vllm_times_seconds_bucket", "m", "2.5"): [3],
        ("vllm_times_seconds_bucket", "m", "+Inf"): [3],
        ("vllm_times_seconds_count", "m"): [3],
        ("vllm_times_seconds_sum", "m"): [6],
    }


def test_the_thread_passes_values_on_and_ends(
    recorded: dict[tuple[str, ...], list[float]], store: MetricStore
) -> None:
    store.gauge("vllm_load", "m").set(5)
    passing = RayMetrics(store, interval_s=0.001)
    while ("vllm_load", "m") not in recorded:
        assert passing._thread.is_alive()
    passing.close()
    assert not passing._thread.is_alive()
    store.gauge("vllm_load", "m").set(6)
    passing.close()
    assert set(recorded["vllm_load", "m"]) == {5}


def test_an_error_of_ray_does_not_end_the_thread(
    recorded: dict[tuple[str, ...], list[float]],
    store: MetricStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed: list[None] = []

    def fail(*_: object, **__: object) -> None:
        failed.append(None)
        raise ValueError("no such tag")

    store.gauge("vllm_load", "m").set(5)
    with monkeypatch.context() as broken:
        broken.setattr(RecordedMetric, "set", fail)
        passing = RayMetrics(store, interval_s=0.001)
        while not failed:
            assert passing._thread.is_alive()
    while ("vllm_load", "m") not in recorded:
        assert passing._thread.is_alive()
    passing.close()
    assert "no such tag" in caplog.text


def test_ray_takes_every_metric() -> None:
    store = MetricStore((*GENERATOR, *POOLER))
    store.open_series("m")
    for metric in store.metrics.values():
        match metric.kind:
            case Kind.GAUGE:
                store.gauge(metric.name, "m", *metric.labels[1:]).set(1)
            case Kind.HISTOGRAM:
                store.histogram(metric.name, "m").observe(1)
            case Kind.COUNTER:
                store.counter(metric.name, "m", *metric.values[:1]).inc()
    RayMetrics(store, NEVER_S).close()
