import pytest

import deployments.classifier_metrics
import deployments.metrics
from serve_app import metrics
from serve_app.metrics import IngressMetrics
from tests.deployments.test_metrics import Recorder

NAMES = {"requests_refused_total"}
"""What dashboards ask for."""


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


def test_no_replica_counts_what_the_ingress_does(recorder: Recorder) -> None:
    IngressMetrics()
    assert set(recorder.values) == NAMES
    for theirs in (deployments.metrics, deployments.classifier_metrics):
        assert not NAMES & {*theirs.GAUGES, *theirs.COUNTERS, *theirs.HISTOGRAMS}
