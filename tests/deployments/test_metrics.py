import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from deployments import metrics
from deployments.engine.output import EngineStats, FinishReason, TextDelta
from deployments.metrics import (
    CLASSIFIER,
    GENERATOR,
    OBSERVATION_S,
    ClassifierMetrics,
    GeneratorMetrics,
    StreamClock,
)

GENERATOR_NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "request_success_total",
}
"""What dashboards ask for; see docs on metrics before changing one."""

CLASSIFIER_NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "request_success_total",
    "prompt_tokens_total",
    "batch_sequences",
    "batch_tokens",
    "e2e_request_latency_seconds",
}
"""What dashboards ask for."""


class Recorder:
    """Replaces all of Ray's metrics and keeps what was recorded."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.tags: list[Mapping[str, str]] = []
        self.boundaries: dict[str, Sequence[float]] = {}

    def make(
        self,
        name: str,
        *,
        description: str,
        boundaries: Sequence[float] = (),
        tag_keys: Sequence[str] | None = None,
    ) -> "RecordedMetric":
        assert description.endswith(".")
        self.values[name] = []
        self.boundaries[name] = boundaries
        return RecordedMetric(self, name, tag_keys or ())


class RecordedMetric:
    """One metric of a recorder: gauge, counter and histogram in one."""

    def __init__(self, recorder: Recorder, name: str, tag_keys: Sequence[str]) -> None:
        self._recorder = recorder
        self._name = name
        self._tag_keys = tag_keys

    def record(self, value: float = 1, tags: Mapping[str, str] | None = None) -> None:
        assert set(tags or {}) == set(self._tag_keys)
        self._recorder.values[self._name].append(value)
        self._recorder.tags += [tags] if tags else []

    set = inc = observe = record


class Now:
    """A monotonic clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, kind, recorder.make)
    return recorder


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    now = Now()
    monkeypatch.setattr(metrics, "time", now)
    return now


def delta(num_tokens: int, reason: FinishReason | None = None) -> TextDelta:
    return TextDelta(tuple(range(num_tokens)), "", reason)


def test_a_generator_has_the_names_that_dashboards_know(recorder: Recorder) -> None:
    GeneratorMetrics()
    assert set(recorder.values) == GENERATOR_NAMES


def test_a_classifier_has_the_names_that_dashboards_know(recorder: Recorder) -> None:
    ClassifierMetrics()
    assert set(recorder.values) == CLASSIFIER_NAMES


def test_a_name_in_both_tables_is_the_same_kind_of_metric() -> None:
    # Ray merges both into one, with the kind and the buckets of the first that is registered.
    for name in CLASSIFIER_NAMES & GENERATOR_NAMES:
        assert (name in CLASSIFIER.gauges) is (name in GENERATOR.gauges)
        assert (name in CLASSIFIER.counters) is (name in GENERATOR.counters)
        if name in GENERATOR.histograms:
            assert CLASSIFIER.histograms[name][1] == GENERATOR.histograms[name][1]


def test_ray_takes_every_metric_of_a_generator() -> None:
    made: Any = GeneratorMetrics()
    made.observe_engine(EngineStats(num_running=1, num_waiting=0, num_steps=1))
    made.observe_finish(FinishReason.STOP, duration_s=1)


def test_ray_takes_every_metric_of_a_classifier() -> None:
    made: Any = ClassifierMetrics()
    made.observe_batch(num_sequences=2, num_tokens=30)
    made.observe_queue(num_running=1, num_waiting=0)


def test_a_classifier_s_buckets_ascend(recorder: Recorder) -> None:
    ClassifierMetrics()
    for bounds in recorder.boundaries.values():
        assert list(bounds) == sorted(set(bounds))


def test_a_generator_s_buckets_ascend(recorder: Recorder) -> None:
    GeneratorMetrics()
    buckets = {name: bounds for name, bounds in recorder.boundaries.items() if bounds}
    assert set(buckets) == {name for name in GENERATOR_NAMES if name.endswith("_seconds")}
    for bounds in buckets.values():
        assert list(bounds) == sorted(set(bounds))


def test_usage_is_the_part_of_the_kv_memory_that_is_held(recorder: Recorder) -> None:
    GeneratorMetrics().observe_engine(EngineStats(2, 5, 9, kv_usage=0.25))
    assert recorder.values["num_requests_running"] == [2]
    assert recorder.values["num_requests_waiting"] == [5]
    assert recorder.values["kv_cache_usage_perc"] == [0.25]


def test_gauges_are_set_only_if_more_than_the_number_of_steps_has_changed(
    recorder: Recorder,
) -> None:
    made = GeneratorMetrics()
    for num_running, num_steps in ((2, 1), (2, 2), (2, 3), (4, 4), (2, 4), (2, 5)):
        usage = num_running / 8
        made.observe_engine(EngineStats(num_running, 5, num_steps, kv_usage=usage))
    assert recorder.values["num_requests_running"] == [2, 4, 2]
    assert recorder.values["num_requests_waiting"] == [5, 5, 5]
    assert recorder.values["kv_cache_usage_perc"] == [0.25, 0.5, 0.25]


def test_cached_tokens_are_counted_once_however_often_stats_come(recorder: Recorder) -> None:
    made = GeneratorMetrics()
    for num_prompt_tokens, num_cached_tokens in ((0, 0), (50, 0), (50, 0), (120, 40)):
        made.observe_engine(EngineStats(1, 0, 1, num_prompt_tokens, num_cached_tokens))
    assert recorder.values["prefix_cache_queries_total"] == [50, 70]
    assert recorder.values["prefix_cache_hits_total"] == [40]


def test_a_stream_is_timed_from_its_arrival(recorder: Recorder, now: Now) -> None:
    clock = StreamClock(GeneratorMetrics(), arrived=99.0)
    clock.observe(delta(1))
    now.seconds = 102.0
    clock.observe(delta(4))
    now.seconds = 103.0
    clock.observe(delta(1, FinishReason.STOP))
    assert recorder.values["time_to_first_token_seconds"] == [1.0]
    assert recorder.values["inter_token_latency_seconds"] == [0.5, 1.0]
    assert recorder.values["e2e_request_latency_seconds"] == [4.0]
    assert sum(recorder.values["generation_tokens_total"]) == 6
    assert recorder.tags == [{"finished_reason": "stop"}]


def test_tokens_between_the_first_and_the_last_are_recorded_together(
    recorder: Recorder, now: Now
) -> None:
    clock = StreamClock(GeneratorMetrics(), arrived=100.0)
    for step in range(1, 101):
        now.seconds = 100 + step / 64
        clock.observe(delta(1, FinishReason.LENGTH if step == 100 else None))
    assert sum(recorder.values["generation_tokens_total"]) == 100
    recorded = recorder.values["inter_token_latency_seconds"]
    assert recorded == [pytest.approx(1 / 64)] * len(recorded)
    assert len(recorded) == math.ceil(99 / math.ceil(64 * OBSERVATION_S))


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_stream_that_was_cut_is_no_success(recorder: Recorder, reason: FinishReason) -> None:
    StreamClock(GeneratorMetrics(), arrived=99.0).observe(delta(1, reason))
    assert recorder.values["request_success_total"] == []
    assert recorder.values["generation_tokens_total"] == [1]


def test_a_stream_without_tokens_has_no_time_to_first_token(recorder: Recorder, now: Now) -> None:
    clock = StreamClock(GeneratorMetrics(), arrived=99.0)
    clock.observe(delta(0))
    assert recorder.values["time_to_first_token_seconds"] == []
    assert recorder.values["generation_tokens_total"] == []


def test_prompts_are_counted(recorder: Recorder) -> None:
    replica = GeneratorMetrics()
    replica.count_prompt(5)
    replica.count_prompt(7)
    assert recorder.values["prompt_tokens_total"] == [5, 7]


def test_a_classifier_records_what_happened(recorder: Recorder) -> None:
    made = ClassifierMetrics()
    made.observe_batch(num_sequences=3, num_tokens=40)
    made.observe_batch(num_sequences=0, num_tokens=0)  # a probe
    made.observe_queue(num_running=2, num_waiting=5)
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
