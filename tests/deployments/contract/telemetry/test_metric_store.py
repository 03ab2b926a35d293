import pickle
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.telemetry.metric_store import Histogram, Kind, Metric, MetricStore

COUNTER = Metric(
    "vllm_ends_total", Kind.COUNTER, "Ends.", ("model_name", "reason"), values=("stop", "length")
)
GAUGE = Metric("vllm_load", Kind.GAUGE, "Load.")
TIMES = Metric("raystream_times_seconds", Kind.HISTOGRAM, "Times.", buckets=(1.0, 2.0))


@pytest.fixture
def store() -> MetricStore:
    return MetricStore([COUNTER, GAUGE, TIMES], "chat", "replica-1")


def test_series_with_known_labels_begin_at_zero(store: MetricStore) -> None:
    store.open_series("m")
    assert store.snapshot().series == {
        "vllm_ends_total": ((("m", "stop"), (0,)), (("m", "length"), (0,))),
        "vllm_load": (),
        "raystream_times_seconds": (),
    }


def test_the_same_labels_are_the_same_series(store: MetricStore) -> None:
    store.counter("vllm_ends_total", "m", "stop").inc()
    store.counter("vllm_ends_total", "m", "stop").inc(2)
    store.counter("vllm_ends_total", "n", "stop").inc()
    found = store.snapshot().series["vllm_ends_total"]
    assert found == ((("m", "stop"), (3,)), (("n", "stop"), (1,)))


def test_a_wrong_kind_and_wrong_labels_are_bugs(store: MetricStore) -> None:
    with pytest.raises(AssertionError, match="gauge"):
        store.counter("vllm_load", "m")
    with pytest.raises(AssertionError, match="labels"):
        store.gauge("vllm_load")


def test_a_value_on_a_bound_falls_into_its_bucket_and_weights_count(store: MetricStore) -> None:
    times = store.histogram("raystream_times_seconds", "m")
    times.observe(1.0, 3)
    times.observe(1.5)
    times.observe(9.0, 2)
    assert times.read() == (3, 4, 6, 3 + 1.5 + 18)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50))))
def test_a_weighted_histogram_is_that_of_each_value_by_itself(
    observed: list[tuple[float, int]],
) -> None:
    bounds = (0.5, 1.0, 10.0)
    weighted, single = Histogram(bounds), Histogram(bounds)
    for value, weight in observed:
        weighted.observe(value, weight)
        for _ in range(weight):
            single.observe(value)
    *counts, total = weighted.read()
    *others, other_total = single.read()
    assert counts == others
    assert total == pytest.approx(other_total)
    assert all(few <= more for few, more in pairwise(counts))
    values = [value for value, weight in observed for _ in range(weight)]
    assert counts == [sum(value <= bound for value in values) for bound in (*bounds, inf)]


def test_a_snapshot_crosses_processes_and_does_not_change(store: MetricStore) -> None:
    store.gauge("vllm_load", "m").set(2)
    taken = store.snapshot()
    store.gauge("vllm_load", "m").set(5)
    copy = pickle.loads(pickle.dumps(taken))
    assert copy == taken
    assert (copy.deployment, copy.replica) == ("chat", "replica-1")
    assert copy.series["vllm_load"] == ((("m",), (2,)),)


def test_vllm_s_names_have_a_colon_where_prometheus_allows_one() -> None:
    assert COUNTER.exposed_name == "vllm:ends_total"
    assert TIMES.exposed_name == "raystream_times_seconds"
