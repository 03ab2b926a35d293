from typing import Any

import pytest

from deployments import classifier_metrics, metrics
from deployments.classifier.device_worker import BatchStats
from deployments.classifier_metrics import ClassifierMetrics
from tests.deployments.test_metrics import Recorder

NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "request_success_total",
    "prompt_tokens_total",
    "batch_sequences",
    "batch_tokens",
    "e2e_request_latency_seconds",
}
"""What dashboards ask for."""


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(classifier_metrics, kind, recorder.make)
    return recorder


def test_the_names_are_those_that_dashboards_know(recorder: Recorder) -> None:
    ClassifierMetrics()
    assert set(recorder.values) == NAMES


def test_buckets_ascend(recorder: Recorder) -> None:
    ClassifierMetrics()
    for bounds in recorder.boundaries.values():
        assert list(bounds) == sorted(set(bounds))


def test_a_name_that_generators_have_too_is_a_metric_of_the_same_kind() -> None:
    # Ray shows both as one, with the kind and the buckets of whichever comes first.
    for name in NAMES & {*metrics.GAUGES, *metrics.COUNTERS, *metrics.HISTOGRAMS}:
        assert (name in classifier_metrics.GAUGES) is (name in metrics.GAUGES)
        assert (name in classifier_metrics.COUNTERS) is (name in metrics.COUNTERS)
        if name in metrics.HISTOGRAMS:
            assert classifier_metrics.HISTOGRAMS[name][1] == metrics.HISTOGRAMS[name][1]


def test_ray_takes_every_metric() -> None:
    made: Any = ClassifierMetrics()
    made.observe_batch(BatchStats(2, 30))
    made.observe_line(num_running=1, num_waiting=0)


def test_what_is_recorded_is_what_happened(recorder: Recorder) -> None:
    made = ClassifierMetrics()
    made.observe_batch(BatchStats(3, 40))
    made.observe_batch(BatchStats(0, 0))  # a probe
    made.observe_line(num_running=2, num_waiting=5)
    made.count_texts(40)
    made.observe_finish(duration_s=0.5)
    assert recorder.values == {
        "batch_sequences": [3],
        "batch_tokens": [40],
        "num_requests_running": [2],
        "num_requests_waiting": [5],
        "prompt_tokens_total": [40],
        "request_success_total": [1],
        "e2e_request_latency_seconds": [0.5],
    }
