import pytest

from deployments.contract.output import EngineStats, FinishReason, TextDelta
from deployments.contract.telemetry.memory_report import MemoryUse, MemoryWarning, Watched
from deployments.contract.telemetry.metric_store import Kind, MetricStore
from deployments.contract.telemetry.metric_table import GENERATOR, POOLER
from deployments.plan.replica_report import NO_WAITS, WaitReason, Waits
from deployments.replica.metrics import GeneratorMetrics, MemoryMetrics, PoolerMetrics, StreamClock

GENERATOR_NAMES = {
    "vllm_num_requests_running",
    "vllm_num_requests_waiting",
    "vllm_kv_cache_usage_perc",
    "vllm_time_to_first_token_seconds",
    "vllm_inter_token_latency_seconds",
    "vllm_request_time_per_output_token_seconds",
    "vllm_e2e_request_latency_seconds",
    "vllm_request_queue_time_seconds",
    "vllm_request_prefill_time_seconds",
    "vllm_request_decode_time_seconds",
    "vllm_request_prompt_tokens",
    "vllm_request_generation_tokens",
    "vllm_request_max_num_generation_tokens",
    "vllm_prompt_tokens_total",
    "vllm_generation_tokens_total",
    "vllm_prefix_cache_queries_total",
    "vllm_prefix_cache_hits_total",
    "vllm_num_preemptions_total",
    "vllm_request_success_total",
    "raystream_replica_start_time_seconds",
    "raystream_requests_waiting",
}
"""What dashboards ask for; see docs/metrics.md before changing one."""

ANY_NAMES = {
    "raystream_longest_wait_seconds",
    "raystream_service_gap_tokens",
    "raystream_replica_memory_bytes",
    "raystream_device_memory_used_bytes",
    "raystream_device_memory_total_bytes",
    "raystream_memory_warnings_total",
    "raystream_replica_asleep",
    "raystream_replica_asleep_memory_bytes",
    "raystream_replica_last_wake_seconds",
}

POOLER_NAMES = {
    "vllm_num_requests_running",
    "vllm_num_requests_waiting",
    "vllm_request_success_total",
    "vllm_prompt_tokens_total",
    "vllm_e2e_request_latency_seconds",
    "raystream_batch_sequences",
    "raystream_batch_tokens",
    "raystream_replica_start_time_seconds",
}
"""What dashboards ask for."""


@pytest.fixture
def store() -> MetricStore:
    return MetricStore({metric.name: metric for metric in (*GENERATOR, *POOLER)}.values())


@pytest.fixture
def generator(store: MetricStore) -> GeneratorMetrics:
    return GeneratorMetrics(store, "m")


@pytest.fixture
def classifier(store: MetricStore) -> PoolerMetrics:
    return PoolerMetrics(store, "c")


def values(store: MetricStore, name: str) -> dict[str, tuple[float, ...]]:
    """Return a metric's numbers by its last label."""
    return {labels[-1]: numbers for labels, numbers in store.snapshot().series[name]}


def number(store: MetricStore, name: str) -> float:
    """Return the number of a metric that has one series."""
    ((value,),) = values(store, name).values()
    return value


def count_and_sum(store: MetricStore, name: str) -> tuple[float, float]:
    """Return a histogram's number of values and their sum, to the microsecond."""
    ((*_, count, total),) = values(store, name).values()
    return count, round(total, 6)


def delta(
    num_tokens: int, reason: FinishReason | None = None, begun_s: float | None = None
) -> TextDelta:
    return TextDelta(tuple(range(num_tokens)), "", reason, begun_s=begun_s)


def test_the_tables_have_the_names_that_dashboards_know() -> None:
    assert {metric.name for metric in GENERATOR} == GENERATOR_NAMES | ANY_NAMES
    assert {metric.name for metric in POOLER} == POOLER_NAMES | ANY_NAMES


def test_a_name_in_both_tables_is_the_same_metric() -> None:
    # Ray merges both into one, with the kind and the labels of the first that is registered.
    of_generators = {metric.name: metric for metric in GENERATOR}
    for metric in POOLER:
        assert of_generators.get(metric.name, metric) is metric


def test_definitions_are_as_prometheus_wants_them() -> None:
    for metric in (*GENERATOR, *POOLER):
        assert metric.description.endswith(".")
        assert metric.labels[0] == "model_name"
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM)
        assert metric.name.endswith("_total") is (metric.kind is Kind.COUNTER)


def test_each_token_s_time_lies_in_a_bucket_of_its_own_range() -> None:
    (itl,) = (each for each in GENERATOR if each.name == "vllm_inter_token_latency_seconds")
    around = {each for each in itl.buckets if 0.001 <= each <= 0.1}
    assert len(around) >= 10


def test_the_engine_s_load_and_totals_are_shown(
    store: MetricStore, generator: GeneratorMetrics
) -> None:
    for num_prompt_tokens, num_cached_tokens in ((50, 0), (50, 0), (120, 40)):
        stats = EngineStats(2, 5, 9, num_prompt_tokens, num_cached_tokens, 0.25, 3)
        generator.observe_engine(stats)
    assert number(store, "vllm_num_requests_running") == 2
    assert number(store, "vllm_num_requests_waiting") == 5
    assert number(store, "vllm_kv_cache_usage_perc") == 0.25
    assert number(store, "vllm_prefix_cache_queries_total") == 120
    assert number(store, "vllm_prefix_cache_hits_total") == 40
    assert number(store, "vllm_num_preemptions_total") == 3


def test_a_stream_is_timed_from_the_request_s_arrival(
    store: MetricStore, generator: GeneratorMetrics
) -> None:
    clock = StreamClock(generator, arrived_s=99.0, num_prompt_tokens=7)
    clock.observe(delta(1, begun_s=99.25), 100.0)
    clock.observe(delta(4), 102.0)
    clock.observe(delta(1, FinishReason.STOP), 103.0)
    assert count_and_sum(store, "vllm_time_to_first_token_seconds") == (1, 1.0)
    assert count_and_sum(store, "vllm_e2e_request_latency_seconds") == (1, 4.0)
    assert count_and_sum(store, "vllm_request_queue_time_seconds") == (1, 0.25)
    assert count_and_sum(store, "vllm_request_prefill_time_seconds") == (1, 0.75)
    assert count_and_sum(store, "vllm_request_decode_time_seconds") == (1, 3.0)
    assert count_and_sum(store, "vllm_request_time_per_output_token_seconds") == (1, 0.6)
    assert count_and_sum(store, "vllm_request_prompt_tokens") == (1, 7)
    assert count_and_sum(store, "vllm_request_generation_tokens") == (1, 6)
    assert count_and_sum(store, "vllm_request_max_num_generation_tokens") == (1, 6)
    assert number(store, "vllm_generation_tokens_total") == 6
    assert values(store, "vllm_request_success_total") == {"stop": (1,), "length": (0,)}


def test_inter_token_latency_is_weighted_by_tokens(
    store: MetricStore, generator: GeneratorMetrics
) -> None:
    clock = StreamClock(generator, arrived_s=0.0, num_prompt_tokens=1)
    clock.observe(delta(3), 1.0)
    clock.observe(delta(99), 1.99)  # 10 ms each
    clock.observe(delta(1), 2.99)  # 1 s
    ((*at_most, total),) = values(store, "vllm_inter_token_latency_seconds").values()
    assert at_most[-1] == 100
    (itl,) = (each for each in GENERATOR if each.name == "vllm_inter_token_latency_seconds")
    assert at_most[itl.buckets.index(0.02)] == 99
    assert total == pytest.approx(1.99)


def test_a_moved_stream_has_no_second_first_token_and_all_its_tokens(
    store: MetricStore, generator: GeneratorMetrics
) -> None:
    clock = StreamClock(generator, arrived_s=90.0, num_prompt_tokens=7, num_given_tokens=5)
    clock.observe(delta(1, begun_s=99.5), 100.0)
    clock.observe(delta(1, FinishReason.LENGTH), 101.0)
    assert number(store, "vllm_generation_tokens_total") == 2
    assert count_and_sum(store, "vllm_e2e_request_latency_seconds") == (1, 11.0)
    assert count_and_sum(store, "vllm_request_generation_tokens") == (1, 7)
    assert count_and_sum(store, "vllm_inter_token_latency_seconds") == (1, 1.0)
    for name in (
        "vllm_time_to_first_token_seconds",
        "vllm_request_queue_time_seconds",
        "vllm_request_prefill_time_seconds",
        "vllm_request_decode_time_seconds",
        "vllm_request_time_per_output_token_seconds",
    ):
        assert count_and_sum(store, name) == (0, 0)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_stream_that_was_cut_is_no_success(
    store: MetricStore, generator: GeneratorMetrics, reason: FinishReason
) -> None:
    clock = StreamClock(generator, arrived_s=99.0, num_prompt_tokens=7)
    clock.observe(delta(1, reason), 100.0)
    assert values(store, "vllm_request_success_total") == {"stop": (0,), "length": (0,)}
    assert number(store, "vllm_generation_tokens_total") == 1


def test_a_stream_without_tokens_has_no_time_to_first_token(
    store: MetricStore, generator: GeneratorMetrics
) -> None:
    clock = StreamClock(generator, arrived_s=99.0, num_prompt_tokens=7)
    clock.observe(delta(0), 100.0)
    assert count_and_sum(store, "vllm_time_to_first_token_seconds") == (0, 0)
    assert number(store, "vllm_generation_tokens_total") == 0


def test_a_prompt_without_an_answer_has_the_phases_up_to_its_end(
    store: MetricStore, generator: GeneratorMetrics
) -> None:
    clock = StreamClock(generator, arrived_s=99.0, num_prompt_tokens=7)
    clock.observe(delta(0), 99.5)  # log-probabilities of the prompt
    clock.observe(delta(0, FinishReason.LENGTH, begun_s=99.25), 100.0)
    assert count_and_sum(store, "vllm_request_queue_time_seconds") == (1, 0.25)
    assert count_and_sum(store, "vllm_request_prefill_time_seconds") == (1, 0.75)
    assert count_and_sum(store, "vllm_request_decode_time_seconds") == (1, 0.0)
    assert count_and_sum(store, "vllm_request_generation_tokens") == (1, 0)
    assert count_and_sum(store, "vllm_time_to_first_token_seconds") == (0, 0)


def test_a_classifier_records_what_happened(store: MetricStore, classifier: PoolerMetrics) -> None:
    classifier.observe_batch(num_sequences=3, num_tokens=40)
    classifier.observe_batch(num_sequences=0, num_tokens=0)  # a probe
    classifier.observe_queue(num_running=2, num_waiting=5)
    classifier.count_prompt(40)
    classifier.observe_finish(duration_s=0.5)
    assert count_and_sum(store, "raystream_batch_sequences") == (1, 3)
    assert count_and_sum(store, "raystream_batch_tokens") == (1, 40)
    assert number(store, "vllm_num_requests_running") == 2
    assert number(store, "vllm_num_requests_waiting") == 5
    assert number(store, "vllm_prompt_tokens_total") == 40
    assert values(store, "vllm_request_success_total") == {"stop": (1,), "length": (0,)}
    assert count_and_sum(store, "vllm_e2e_request_latency_seconds") == (1, 0.5)


def test_why_and_how_long_sequences_wait_is_recorded_until_none_does(
    store: MetricStore, generator: GeneratorMetrics
) -> None:
    generator.observe_waits(Waits({WaitReason.TURN: 2, WaitReason.DISPLACED: 1}, 4.5, 120.0))
    waiting = {"turn": (2,), "memory": (0,), "displaced": (1,)}
    assert values(store, "raystream_requests_waiting") == waiting
    assert number(store, "raystream_longest_wait_seconds") == 4.5
    assert number(store, "raystream_service_gap_tokens") == 120
    generator.observe_waits(NO_WAITS)
    assert values(store, "raystream_requests_waiting") == dict.fromkeys(waiting, (0,))
    assert number(store, "raystream_longest_wait_seconds") == 0
    assert number(store, "raystream_service_gap_tokens") == 0


def test_memory_is_recorded_as_far_as_it_is_known(store: MetricStore) -> None:
    made = MemoryMetrics(store, "m")
    made.observe(MemoryUse(process_bytes=30))
    assert store.snapshot().series["raystream_device_memory_used_bytes"] == ()
    made.observe(MemoryUse(100, 50, 20))
    made.observe(MemoryUse(process_bytes=40))
    made.count_warning(MemoryWarning(Watched.SHARE, 96, 100, 1.0))
    assert number(store, "raystream_replica_memory_bytes") == 40
    assert number(store, "raystream_device_memory_used_bytes") == 50
    assert number(store, "raystream_device_memory_total_bytes") == 100
    assert values(store, "raystream_memory_warnings_total") == {"share": (1,)}
