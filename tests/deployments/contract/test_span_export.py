import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from http import HTTPStatus
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from benchmarks.free_port import free_port
from deployments.contract import span_export as module
from deployments.contract.span_export import (
    MAX_BATCH_SPANS,
    MAX_QUEUED_SPANS,
    SpanExport,
    _Exporter,
    _ThinLog,
    encoded,
)
from tests.otlp_receiver import DEADLINE_S, Receiver, receiving

RESOURCE = Resource({"service.name": "s", "some.number": 1})
TIMES_NS = st.integers(0, 2**64 - 1)


class Name(StrEnum):
    """A string of a type of its own, as attributes may be."""

    A = "a name"


def contexts(*, is_remote: bool) -> st.SearchStrategy[SpanContext]:
    return st.builds(
        SpanContext,
        st.integers(1, 2**128 - 1),
        st.integers(1, 2**64 - 1),
        st.just(is_remote),
        st.sampled_from([TraceFlags(1), TraceFlags(3)]),
        st.sampled_from([TraceState(), TraceState([("a", "1"), ("b", "2")])]),
    )


VALUES = (
    st.text()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.lists(st.text()).map(tuple)
    | st.sampled_from([Name.A, HTTPStatus.OK, (Name.A,)])
)
ATTRIBUTES = st.dictionaries(st.text(), VALUES, max_size=4)
SPANS = st.builds(
    trace.ReadableSpan,
    name=st.text(),
    context=contexts(is_remote=False),
    parent=st.none() | contexts(is_remote=True) | contexts(is_remote=False),
    resource=st.just(RESOURCE),
    attributes=ATTRIBUTES,
    events=st.lists(st.builds(trace.Event, st.text(), ATTRIBUTES, TIMES_NS), max_size=2),
    kind=st.sampled_from(SpanKind),
    status=st.sampled_from([Status(StatusCode.UNSET), Status(StatusCode.ERROR)]),
    start_time=TIMES_NS,
    end_time=TIMES_NS,
    instrumentation_scope=st.just(InstrumentationScope("raystream")),
)


@contextmanager
def exporting(url: str) -> Iterator[SpanExport]:
    export = SpanExport(url, "service", "instance")
    try:
        yield export
    finally:
        export.close()


def put_spans(export: SpanExport, num_spans: int) -> None:
    for number in range(num_spans):
        context = SpanContext(1, 1 + number, is_remote=False, trace_flags=TraceFlags(1))
        name = f"span {number}"
        export.put(name, SpanKind.SERVER, context, None, (1, 2), {}, [], failed=False)


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


@pytest.mark.slow
@given(st.lists(SPANS, min_size=1, max_size=3))
def test_spans_are_encoded_as_the_sdk_does(spans: list[trace.ReadableSpan]) -> None:
    assert ExportTraceServiceRequest.FromString(encoded(spans)) == encode_spans(spans)


def test_an_attribute_of_another_type_is_an_error() -> None:
    span = trace.ReadableSpan(
        "s",
        SpanContext(1, 1, is_remote=False),
        resource=RESOURCE,
        attributes={"a": None},
        start_time=1,
        end_time=2,
    )
    with pytest.raises(TypeError, match="NoneType"):
        encoded([span])


def test_an_exporter_of_another_version_encodes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(self: OTLPSpanExporter, spans: Sequence[trace.ReadableSpan]) -> SpanExportResult:
        taken.extend(spans)
        return SpanExportResult.SUCCESS

    taken: list[trace.ReadableSpan] = []
    monkeypatch.setattr(OTLPSpanExporter, "export", export)
    exporter = _Exporter("http://127.0.0.1:9")
    del exporter._client
    span = trace.ReadableSpan("s", SpanContext(1, 1, is_remote=False), resource=RESOURCE)
    assert exporter.export([span]) is SpanExportResult.SUCCESS
    assert taken == [span]


def test_the_last_spans_are_sent_at_the_end(receiver: Receiver) -> None:
    with exporting(receiver.url) as export:
        put_spans(export, 10)
        assert receiver.spans == []
    assert len(receiver.spans) == 10
    export.close()
    assert len(receiver.spans) == 10


@pytest.mark.slow
def test_a_dead_collector_costs_one_line_of_the_log(
    thin_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(module, "FLUSH_S", 0.0)
    url = f"http://127.0.0.1:{free_port()}"
    with exporting(url) as export:
        put_spans(export, 2 * MAX_QUEUED_SPANS)
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
            with exporting(receiver.url) as export:
                put_spans(export, MAX_BATCH_SPANS)
                receiver.wait_for(lambda spans: len(spans) >= MAX_BATCH_SPANS)
                put_spans(export, 2 * MAX_QUEUED_SPANS)
                export.close()
                assert "last-spans" in {each.name for each in threading.enumerate()}
        finally:
            answers.set()
        join_exporters()
        assert len(receiver.spans) <= MAX_BATCH_SPANS + MAX_QUEUED_SPANS
