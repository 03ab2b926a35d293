import pytest

from deployments.contract.errors import OverloadReason
from deployments.contract.telemetry.metric_table import GENERATOR, POOLER
from serve_app.http.request_record import MoveReason, RequestRecord
from serve_app.http.standing import Standing
from serve_app.metrics import (
    ALL,
    DELIVERED_TOKENS,
    INGRESS,
    MAX_GATEWAY_TENANTS,
    MOVES,
    OTHERS,
    PARKED,
    PARKED_TIME,
    PROMPT_TOKENS,
    REJECTIONS,
    IngressMetrics,
)
from tests.serve_app.ingress_numbers import numbers

NAMES = {
    "vllm_admission_rejections_total",
    "raystream_streams_moved_total",
    "raystream_prompt_tokens_total",
    "raystream_delivered_tokens_total",
    "raystream_streams_parked",
    "raystream_parked_seconds",
    "raystream_batch_lines_total",
    "raystream_batches_running",
}
"""The names that dashboards query."""


@pytest.fixture
def metrics() -> IngressMetrics:
    return IngressMetrics(["a", "b"])


def record(metrics: IngressMetrics, model: str = "a", key: str | None = None) -> RequestRecord:
    made = RequestRecord("r", "POST", lambda: 0.0, 0.0, meter=metrics)
    made.model, made.key_name = model, key
    return made


def test_the_table_has_the_names_that_dashboards_know() -> None:
    assert {metric.name for metric in INGRESS} == NAMES


def test_no_replica_has_a_metric_of_the_ingress() -> None:
    # A sum over all processes counts each thing once.
    assert not NAMES & {metric.name for metric in (*GENERATOR, *POOLER)}
    assert ALL.keys() >= NAMES


def test_each_refused_request_counts_as_one_of_its_model(metrics: IngressMetrics) -> None:
    for model_id, reason in (
        ("a", OverloadReason.REQUESTS),
        ("b", OverloadReason.TOKENS),
        ("a", OverloadReason.REQUESTS),
        ("a", OverloadReason.LOADING),
    ):
        refused = record(metrics, model_id)
        refused.failed("overloaded", reason)
        refused.refused("overloaded", reason)  # the same error, on its way to the client
    record(metrics).failed("generation_failed")
    left = record(metrics)
    left.abandoned()
    left.refused("overloaded", OverloadReason.REQUESTS)
    assert numbers(metrics, REJECTIONS) == {
        ("a", "max_queued_requests"): 2,
        ("a", "loading"): 1,
        ("b", "max_queued_tokens"): 1,
    }


def test_tokens_are_counted_for_each_model_and_key(metrics: IngressMetrics) -> None:
    alice, bob = record(metrics, "a", "alice"), record(metrics, "b", "bob")
    alice.opened(7)
    for num_tokens in (1, 4, 0):
        alice.gained(num_tokens, None)
        alice.delivered()
    bob.opened(3)
    bob.gained(2, "stop")
    bob.delivered()
    bob.delivered()  # as with the last message, which may hold no token
    nameless = record(metrics)
    nameless.gained(1, "stop")
    nameless.delivered()
    record(metrics).gained(8, None)  # a whole answer that fails is not sent
    assert numbers(metrics, PROMPT_TOKENS) == {("a", "alice"): 7, ("b", "bob"): 3}
    assert numbers(metrics, DELIVERED_TOKENS) == {("a", "alice"): 5, ("b", "bob"): 2, ("a", ""): 1}


def test_moves_are_counted_by_their_reason(metrics: IngressMetrics) -> None:
    moving = record(metrics)
    for reason in (MoveReason.LOST, MoveReason.DRAINED, MoveReason.LOST):
        moving.moved(reason)
    assert moving.num_moves == 3
    assert numbers(metrics, MOVES) == {("a", "lost"): 2, ("a", "drained"): 1}


def test_series_of_all_models_begin_at_zero(metrics: IngressMetrics) -> None:
    found = metrics.store.snapshot().series["raystream_streams_moved_total"]
    expected = {(model, reason.value) for model in "ab" for reason in MoveReason}
    assert {labels for labels, _ in found} == expected


def test_a_parked_stream_counts_until_it_goes_on(metrics: IngressMetrics) -> None:
    now_s = 10.0
    made = RequestRecord("r", "POST", lambda: now_s, 0.0, model="b", meter=metrics)
    assert metrics.store.snapshot().series[PARKED.name] == ((("a",), (0,)), (("b",), (0,)))
    with made.parked():
        with made.parked():  # another answer of the same request
            assert numbers(metrics, PARKED)[("b",)] == 2
            now_s = 13.0
        assert numbers(metrics, PARKED)[("b",)] == 1
        now_s = 14.0
    assert numbers(metrics, PARKED) == {}
    times = metrics.store.histogram(PARKED_TIME.name, "b").read()
    assert (times[-2], times[-1]) == (2, 3.0 + 4.0)
    assert made.num_parked == 2


def test_a_stream_that_ends_while_it_is_parked_is_counted_no_more(metrics: IngressMetrics) -> None:
    with pytest.raises(ConnectionError), record(metrics).parked():
        raise ConnectionError
    assert numbers(metrics, PARKED) == {}


def test_tenants_of_a_gateway_are_counted_by_name_up_to_a_number(metrics: IngressMetrics) -> None:
    for number in range(MAX_GATEWAY_TENANTS + 3):
        asked = record(metrics, key="gateway")
        asked.standing = Standing().of_tenant(f"tenant {number}")
        asked.opened(2)
        asked.opened(2)
    for number in range(MAX_GATEWAY_TENANTS + 3):
        asked = record(metrics, key=f"tenant {number}")
        asked.standing = Standing(f"tenant {number}")
        asked.opened(1)
    counted = numbers(metrics, PROMPT_TOKENS)
    for number in (0, MAX_GATEWAY_TENANTS - 1):
        assert counted[("a", f"gateway:tenant {number}")] == 4
    assert counted[("a", OTHERS)] == 3 * 4
    assert counted[("a", "tenant 0")] == 1, "a key of that name is another tenant"
    assert len(counted) == MAX_GATEWAY_TENANTS + 1 + MAX_GATEWAY_TENANTS + 3
