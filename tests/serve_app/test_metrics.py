import pytest

from deployments.metrics import CLASSIFIER, GENERATOR
from serve_app import metrics
from serve_app.metrics import IngressMetrics
from tests.deployments.test_metrics import Recorder

NAMES = {"requests_refused_total"}
"""The names that dashboards query."""


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(metrics, "Counter", recorder.make)
    return recorder


def test_each_refused_request_counts_as_one_of_its_model(recorder: Recorder) -> None:
    made = IngressMetrics()
    for model_id in ("a", "b", "a"):
        made.refusals_of(model_id)()
    assert recorder.values == {"requests_refused_total": [1, 1, 1]}
    assert recorder.tags == [{"model": "a"}, {"model": "b"}, {"model": "a"}]


def test_ray_takes_every_metric() -> None:
    IngressMetrics().refusals_of("a")()


def test_no_replica_has_a_metric_of_the_ingress(recorder: Recorder) -> None:
    IngressMetrics()
    assert set(recorder.values) == NAMES
    for theirs in (GENERATOR, CLASSIFIER):
        assert not NAMES & {*theirs.gauges, *theirs.counters, *theirs.histograms}
