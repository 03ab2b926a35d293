import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

import pytest

from benchmarks.free_port import free_port
from deployments.tracing import (
    FLUSH_S,
    MAX_BATCH_SPANS,
    MAX_QUEUED_SPANS,
    SpanKind,
    TraceContext,
    Tracer,
    TracingSettings,
    _ThinLog,
    open_tracer,
)
from tests.otlp_receiver import DEADLINE_S, Receiver, receiving

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"

LISTS_MODULES = """
import sys, threading
from deployments.tracing import open_tracer
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


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def thin_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Let the next line of the SDK pass, whatever it has logged before."""
    sdk = logging.getLogger("opentelemetry")
    for handler in [each for each in sdk.handlers if isinstance(each, _ThinLog)]:
        sdk.removeHandler(handler)
    caplog.set_level(logging.DEBUG)
    return caplog


def end_spans(tracer: Tracer, num_spans: int) -> None:
    for number in range(num_spans):
        span = tracer.start(f"span {number}", SpanKind.SERVER, None, {})
        assert span is not None
        span.end({})


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
        "import deployments.gen_ai_spans, serve_app.middleware.tracing, serve_app.config"
    )
    assert not [name for name in modules if name.startswith("opentelemetry.sdk")]
    assert threads == ["MainThread"]


def test_without_an_endpoint_neither_ingress_nor_replica_imports_the_exporter() -> None:
    # Ray Serve itself imports the SDK.
    modules, threads = loaded_modules("import serve_app.ingress, deployments.text_generator")
    assert not [name for name in modules if name.startswith("opentelemetry.exporter.otlp")]
    assert not [name for name in threads if name.startswith("Otel")]


def test_a_span_goes_to_the_collector_with_its_headers(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    with traced(f"{receiver.url}/") as tracer:
        parent = TraceContext(PARENT, "other=1,vendor=a")
        span = tracer.start("work", SpanKind.CLIENT, parent, {"first": 1})
        assert span is not None
        assert span.trace_id == TRACE_ID
        assert span.context.tracestate == "other=1,vendor=a"
        span.add_event("happened", {"why": "so"})
        span.end({"second": ("a", "b")}, name="work done", failed=True)
    (found,) = receiver.spans
    assert span.context.traceparent == f"00-{TRACE_ID}-{found.span_id}-01"
    assert receiver.headers[0]["x-key"] == "secret"
    assert (found.name, found.kind, found.has_failed) == ("work done", 3, True)
    assert (found.trace_id, found.parent_id) == (TRACE_ID, PARENT_ID)
    assert found.tracestate == "other=1,vendor=a"
    assert (found.service, found.instance_id) == ("service", "instance")
    assert found.attributes == {"first": 1, "second": ["a", "b"]}
    assert found.events == [("happened", {"why": "so"})]


@pytest.mark.parametrize(
    "traceparent",
    [
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
    ],
)
def test_a_parent_that_is_not_valid_begins_a_new_trace(
    receiver: Receiver, thin_log: pytest.LogCaptureFixture, traceparent: str
) -> None:
    with traced(receiver.url) as tracer:
        span = tracer.start("work", SpanKind.SERVER, TraceContext(traceparent, "a=1"), {})
        assert span is not None
        span.end({})
    (found,) = receiver.spans
    assert found.parent_id == ""
    assert found.trace_id != TRACE_ID
    assert warnings_of(thin_log) == []


@pytest.mark.parametrize("tracestate", ["=", "a=1,a=2", "a" * 600 + "=1", "\x00", "a=é"])
def test_a_tracestate_that_is_not_valid_is_left_out(
    receiver: Receiver, thin_log: pytest.LogCaptureFixture, tracestate: str
) -> None:
    with traced(receiver.url) as tracer:
        span = tracer.start("work", SpanKind.SERVER, TraceContext(PARENT, tracestate), {})
        assert span is not None
        span.end({})
    (found,) = receiver.spans
    assert (found.trace_id, found.tracestate) == (TRACE_ID, "")
    assert warnings_of(thin_log) == []


def test_a_parent_decides_whether_a_span_is_recorded_and_else_the_ratio(
    receiver: Receiver,
) -> None:
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


def test_the_last_spans_are_sent_at_the_end(receiver: Receiver) -> None:
    with traced(receiver.url) as tracer:
        end_spans(tracer, 10)
        assert receiver.spans == []
    assert len(receiver.spans) == 10
    tracer.close()
    assert len(receiver.spans) == 10


def test_a_dead_collector_costs_one_line_of_the_log(
    thin_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    url = f"http://127.0.0.1:{free_port()}"
    with traced(url) as tracer:
        end_spans(tracer, 2 * MAX_QUEUED_SPANS)
        began_s = time.monotonic()
        tracer.close()
        assert time.monotonic() - began_s < FLUSH_S + 1
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


def test_a_collector_that_hangs_holds_nothing_up_and_the_queue_is_bounded() -> None:
    answers = Event()
    with receiving(answers) as receiver:
        try:
            with traced(receiver.url) as tracer:
                end_spans(tracer, MAX_BATCH_SPANS)
                receiver.wait_for(lambda spans: len(spans) >= MAX_BATCH_SPANS)
                end_spans(tracer, 2 * MAX_QUEUED_SPANS)
                began_s = time.monotonic()
                tracer.close()
                assert time.monotonic() - began_s < FLUSH_S + 1
        finally:
            answers.set()
        join_exporters()
        assert len(receiver.spans) <= MAX_BATCH_SPANS + MAX_QUEUED_SPANS
