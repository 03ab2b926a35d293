import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

import pytest
from opentelemetry.trace import StatusCode, get_tracer_provider

from benchmarks.free_port import free_port
from deployments.contract.telemetry import tracing as module
from deployments.contract.telemetry.tracing import (
    MAX_BATCH_SPANS,
    MAX_QUEUED_SPANS,
    SpanKind,
    TraceContext,
    Tracer,
    TracingSettings,
    _ThinLog,
    context_of,
    open_tracer,
)
from tests.otlp_receiver import DEADLINE_S, Receiver, receiving

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"

LISTS_MODULES = """
import sys, threading
from deployments.contract.telemetry.tracing import open_tracer
assert open_tracer(None, "service", "instance") is None
print(*sorted(name for name in sys.modules if name.startswith("opentelemetry.")))
print(*(thread.name for thread in threading.enumerate()))
"""


@contextmanager
def traced(url: str, sample_ratio: float = 1.0) -> Iterator[Tracer]:
    tracer = open_tracer(TracingSettings(url, sample_ratio), "service", "instance")
    assert tracer is not None
    try:
        yield tracer
    finally:
        tracer.close()


def end_spans(tracer: Tracer, num_spans: int) -> None:
    for number in range(num_spans):
        span = tracer.start(f"span {number}", SpanKind.SERVER, None, {})
        assert span is not None
        span.end()


def warnings_of(caplog: pytest.LogCaptureFixture, logger: str = "") -> list[str]:
    return [
        each.getMessage()
        for each in caplog.records
        if each.levelno >= logging.WARNING and each.name.startswith(logger)
    ]


def join_exporters() -> None:
    """Wait until nothing is sent any more."""
    for thread in threading.enumerate():
        if thread.name in ("OtelBatchSpanRecordProcessor", "last-spans"):
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def loaded_modules(statement: str) -> tuple[list[str], list[str]]:
    """Return the modules of OpenTelemetry, and the threads, of a process with tracing off."""
    command = [sys.executable, "-c", statement + LISTS_MODULES]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    modules, threads = output.splitlines()[-2:]
    return modules.split(), threads.split()


def test_without_an_endpoint_our_code_does_not_import_the_sdk() -> None:
    modules, threads = loaded_modules(
        "import deployments.contract.gen_ai_spans, serve_app.middleware.tracing, serve_app.config"
    )
    assert not [name for name in modules if name.startswith("opentelemetry.sdk")]
    assert threads == ["MainThread"]


@pytest.mark.slow
def test_without_an_endpoint_neither_ingress_nor_replica_imports_the_exporter() -> None:
    # Ray Serve itself imports the SDK.
    modules, threads = loaded_modules(
        "import serve_app.ingress_replica, deployments.text_generator"
    )
    assert not [name for name in modules if name.startswith("opentelemetry.exporter.otlp")]
    assert not [name for name in threads if name.startswith("Otel")]


def test_a_span_goes_to_the_collector_with_its_headers(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    with traced(f"{receiver.url}/") as tracer:
        parent = TraceContext(PARENT, "other=1,vendor=a")
        span = tracer.start("work", SpanKind.CLIENT, parent, {"first": "a"})
        assert span is not None
        span.add_event("happened", {"why": "so"})
        span.set_attribute("second", ("a", "b"))
        span.set_status(StatusCode.ERROR)
        span.end()
    (found,) = receiver.spans
    assert context_of(span) == TraceContext(f"00-{TRACE_ID}-{found.span_id}-01", "other=1,vendor=a")
    assert receiver.headers[0]["x-key"] == "secret"
    assert (found.name, found.kind, found.has_failed) == ("work", 3, True)
    assert (found.trace_id, found.parent_id) == (TRACE_ID, PARENT_ID)
    assert found.tracestate == "other=1,vendor=a"
    assert (found.service, found.instance_id) == ("service", "instance")
    assert found.attributes == {"first": "a", "second": ["a", "b"]}
    assert found.events == [("happened", {"why": "so"})]


@pytest.mark.parametrize("limit", ["-1", "0", "many"])
def test_the_sdk_s_variables_for_limits_have_no_effect(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    with traced(receiver.url):  # imports the SDK, which reads a limit at that time
        pass
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "256")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4096")
    for name in (
        *("ATTRIBUTE_COUNT", "ATTRIBUTE_VALUE_LENGTH", "SPAN_ATTRIBUTE_COUNT"),
        *("SPAN_ATTRIBUTE_VALUE_LENGTH", "SPAN_EVENT_COUNT", "SPAN_LINK_COUNT"),
        *("EVENT_ATTRIBUTE_COUNT", "LINK_ATTRIBUTE_COUNT"),
    ):
        monkeypatch.setenv(f"OTEL_{name}_LIMIT", limit)
    with traced(receiver.url) as tracer:
        span = tracer.start("work", SpanKind.SERVER, None, {"first": "abc"})
        assert span is not None
        span.add_event("happened", {"why": "so"})
        span.end()
    (found,) = receiver.spans
    assert found.attributes == {"first": "abc"}
    assert found.events == [("happened", {"why": "so"})]


def test_a_disabled_sdk_turns_tracing_off_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, thin_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "True ")
    assert open_tracer(TracingSettings("http://127.0.0.1:1"), "service", "instance") is None
    (line,) = warnings_of(thin_log)
    assert "OTEL_SDK_DISABLED" in line


INVALID_PARENTS = (
    "",
    "nonsense",
    PARENT[:-1],
    PARENT.upper(),
    f"{PARENT}-more",
    f"ff{PARENT[2:]}",
    f"00-{'0' * 32}-{PARENT_ID}-01",
    f"00-{TRACE_ID}-{'0' * 16}-01",
    f"cc{PARENT[2:]}-{'a' * 100_000}",
    "00-\x00\xff" + "é" * 40,
)


def test_a_parent_that_is_not_valid_begins_a_new_trace(
    receiver: Receiver, thin_log: pytest.LogCaptureFixture
) -> None:
    with traced(receiver.url) as tracer:
        for parent in INVALID_PARENTS:
            context = TraceContext(parent, "a=1")
            span = tracer.start(ascii(parent[:99]), SpanKind.SERVER, context, {})
            assert span is not None, parent
            span.end()
    found = {span.name: (span.parent_id, span.trace_id == TRACE_ID) for span in receiver.spans}
    assert found == {ascii(parent[:99]): ("", False) for parent in INVALID_PARENTS}
    assert warnings_of(thin_log) == []


def test_a_tracestate_that_is_not_valid_is_left_out(
    receiver: Receiver, thin_log: pytest.LogCaptureFixture
) -> None:
    tracestates = ("=", "a=1,a=2", "a" * 600 + "=1", "\x00", "a=é")
    with traced(receiver.url) as tracer:
        for tracestate in tracestates:
            context = TraceContext(PARENT, tracestate)
            span = tracer.start(ascii(tracestate), SpanKind.SERVER, context, {})
            assert span is not None, tracestate
            span.end()
    found = {span.name: (span.trace_id, span.tracestate) for span in receiver.spans}
    assert found == {ascii(tracestate): (TRACE_ID, "") for tracestate in tracestates}
    assert warnings_of(thin_log) == []


def test_a_parent_decides_whether_a_span_is_recorded_and_else_the_ratio(receiver: Receiver) -> None:
    def is_recorded(tracer: Tracer, parent: str | None) -> bool:
        context = None if parent is None else TraceContext(parent)
        return tracer.start("work", SpanKind.SERVER, context, {}) is not None

    with traced(receiver.url, sample_ratio=0) as none, traced(receiver.url) as all_:
        assert [is_recorded(none, each) for each in (PARENT, UNSAMPLED, None)] == [
            True,
            False,
            False,
        ]
        assert [is_recorded(all_, each) for each in (PARENT, UNSAMPLED, None)] == [
            True,
            False,
            True,
        ]


def test_the_ratio_samples_by_the_last_half_of_the_trace_s_id(receiver: Receiver) -> None:
    with traced(receiver.url, sample_ratio=0.25) as tracer:
        spans = [tracer.start("work", SpanKind.SERVER, None, {}) for _ in range(400)]
    trace_ids = [span.get_span_context().trace_id for span in spans if span is not None]
    assert 0 < len(trace_ids) < len(spans)
    assert all(trace_id % 2**64 < 2**62 for trace_id in trace_ids)


def test_a_tracer_is_not_the_process_s_global_one(receiver: Receiver) -> None:
    with traced(receiver.url) as tracer:
        assert get_tracer_provider() is not tracer.provider


def test_the_last_spans_are_sent_at_the_end(receiver: Receiver) -> None:
    with traced(receiver.url) as tracer:
        end_spans(tracer, 10)
        assert receiver.spans == []
    assert len(receiver.spans) == 10
    tracer.close()
    assert len(receiver.spans) == 10


@pytest.mark.slow
def test_a_dead_collector_costs_one_line_of_the_log(
    thin_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(module, "FLUSH_S", 0.0)
    with traced(f"http://127.0.0.1:{free_port()}") as tracer:
        end_spans(tracer, 2 * MAX_QUEUED_SPANS)
    join_exporters()
    # pytest also collects what goes no further than the SDK's own logger.
    (line,) = warnings_of(thin_log, "ray.serve")
    assert not logging.getLogger("opentelemetry").propagate
    assert line.startswith("traces are not sent")


def test_the_log_is_thin_for_a_minute(thin_log: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    handler = _ThinLog(lambda: now_s)
    record = logging.makeLogRecord({"msg": "two\nlines", "levelno": logging.WARNING})
    for _ in range(3):
        handler.handle(record)
    now_s += 60
    handler.handle(record)
    line = "traces are not sent, or only in part: two lines"
    assert warnings_of(thin_log, "ray.serve") == [line, line]


def test_a_collector_that_hangs_holds_nothing_up_and_the_queue_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(DEADLINE_S))
    monkeypatch.setattr(module, "FLUSH_S", 0.0)
    answers = Event()
    with receiving(answers) as receiver:
        try:
            with traced(receiver.url) as tracer:
                end_spans(tracer, MAX_BATCH_SPANS)
                receiver.wait_for(lambda spans: len(spans) >= MAX_BATCH_SPANS)
                end_spans(tracer, 2 * MAX_QUEUED_SPANS)
                tracer.close()
                assert "last-spans" in {each.name for each in threading.enumerate()}
        finally:
            answers.set()
        join_exporters()
        assert len(receiver.spans) <= MAX_BATCH_SPANS + MAX_QUEUED_SPANS
