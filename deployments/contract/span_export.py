"""Sends spans that have ended to an OpenTelemetry collector, over OTLP/HTTP.

Spans are queued, and leave in batches from a thread of the SDK; a full queue drops the oldest. The
queue, the thread, the HTTP client and the variables that set it up are the SDK's. Its tracer and
its encoder are not used: each of the two takes several times as long as ours, on the same process
that writes tokens. The bytes are the same.

This module imports the SDK, so it is only imported if there is a collector.

Source: https://github.com/open-telemetry/opentelemetry-proto/blob/main/opentelemetry/proto/trace/v1/trace.proto
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

logger = logging.getLogger("ray.serve.raystream.tracing")

MAX_QUEUED_SPANS: Final = 2048
MAX_BATCH_SPANS: Final = 512
EXPORT_INTERVAL_S: Final = 1.0
"""The longest time between two exports; a killed process loses the spans since the last one."""

FLUSH_S: Final = 0.9
"""How long the end of a process waits for its last spans."""

LOG_INTERVAL_S: Final = 60.0
"""The SDK logs each failed export and each dropped span; one line in this time is passed on."""

MAX_LOG_LENGTH: Final = 300

_SCOPE: Final = InstrumentationScope("raystream")
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
_KINDS: Final = {kind: trace_pb2.Span.SpanKind.Value(f"SPAN_KIND_{kind.name}") for kind in SpanKind}


class SpanExport:
    """Queues the spans of one process, and sends them."""

    def __init__(self, otlp_endpoint: str, service: str, instance_id: str) -> None:
        """Start the thread that sends.

        Args:
            otlp_endpoint: See `TracingSettings`.
            service: What this process is part of, as traces name it.
            instance_id: Identifies this process among those of the service.
        """
        _thin_out_logs()
        self._resource = Resource.create(
            {
                "service.name": service,
                "service.namespace": "raystream",
                "service.instance.id": instance_id,
            }
        )
        self._processor = BatchSpanProcessor(
            _Exporter(f"{otlp_endpoint.rstrip('/')}/v1/traces"),
            max_queue_size=MAX_QUEUED_SPANS,
            schedule_delay_millis=1e3 * EXPORT_INTERVAL_S,
            max_export_batch_size=MAX_BATCH_SPANS,
        )
        self._is_closed = False

    def put(
        self,
        name: str,
        kind: SpanKind,
        context: SpanContext,
        parent: SpanContext | None,
        times_ns: tuple[int, int],
        attributes: Mapping[str, Any],
        events: Sequence[tuple[str, int, Mapping[str, Any]]],
        *,
        failed: bool,
    ) -> None:
        """Queue a span; nothing of it may change afterwards.

        Args:
            name: The span's name.
            kind: Whether it answered a call or made one.
            context: Its ids, and what belongs to its trace.
            parent: The context of the span above; None if the trace begins with this one.
            times_ns: When it began and ended, in Unix nanoseconds.
            attributes: All attributes.
            events: The name of each event, when it happened, and its attributes.
            failed: Whether the server has failed at its work.
        """
        begun_ns, ended_ns = times_ns
        self._processor.on_end(
            ReadableSpan(
                name,
                context,
                parent,
                self._resource,
                attributes,
                [Event(each, told, at_ns) for each, at_ns, told in events],
                kind=kind,
                status=_ERROR if failed else _UNSET,
                start_time=begun_ns,
                end_time=ended_ns,
                instrumentation_scope=_SCOPE,
            )
        )

    def flush(self) -> bool:
        """Send all spans that are queued, and wait for that; return whether there was time."""
        return self._processor.force_flush()

    def close(self) -> None:
        """Send what is left, within a second; closing twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        # The SDK's own limit is half a minute, which a dead collector would use up. The thread ends
        # with the process.
        closing = Thread(target=self._processor.shutdown, name="last-spans", daemon=True)
        closing.start()
        closing.join(FLUSH_S)


class _Exporter(OTLPSpanExporter):
    """The SDK's exporter with our encoder, or with its own in a version that sends otherwise."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans of one process."""
        client = getattr(self, "_client", None)
        if client is None:
            return super().export(spans)
        sent = client.export(encoded(spans))
        return SpanExportResult.SUCCESS if sent.success else SpanExportResult.FAILURE


def encoded(spans: Sequence[ReadableSpan]) -> bytes:
    """Return the body of a request that exports spans, at least one, of one process.

    The SDK's encoder builds each message by itself and copies it into the next larger one, four
    times over. This one writes into the request.
    """
    request = ExportTraceServiceRequest()
    of_resource = request.resource_spans.add()
    _add_attributes(of_resource.resource, spans[0].resource.attributes)
    of_scope = of_resource.scope_spans.add()
    of_scope.scope.name = _SCOPE.name
    for span in spans:
        _write(span, of_scope.spans.add())
    body: bytes = request.SerializeToString()
    return body


def _write(span: ReadableSpan, message: Any) -> None:
    """Write a span into an empty message `Span`."""
    context, parent = span.get_span_context(), span.parent
    assert context is not None
    message.trace_id = context.trace_id.to_bytes(16)
    message.span_id = context.span_id.to_bytes(8)
    message.flags = trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
    if parent is not None:
        message.parent_span_id = parent.span_id.to_bytes(8)
        if parent.is_remote:
            message.flags |= trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
    if context.trace_state:
        message.trace_state = context.trace_state.to_header()
    message.name = span.name
    message.kind = _KINDS[span.kind]
    message.start_time_unix_nano = span.start_time
    message.end_time_unix_nano = span.end_time
    message.status.code = span.status.status_code.value
    _add_attributes(message, span.attributes)
    for event in span.events:
        told = message.events.add(name=event.name, time_unix_nano=event.timestamp)
        _add_attributes(told, event.attributes)


def _add_attributes(message: Any, attributes: Mapping[str, Any] | None) -> None:
    for key, value in (attributes or {}).items():
        attribute = message.attributes.add()
        attribute.key = key
        _set(attribute.value, value)


def _set(message: AnyValue, value: object) -> None:
    match value:
        case str():
            message.string_value = value
        case bool():
            message.bool_value = value
        case int():
            message.int_value = value
        case float():
            message.double_value = value
        case tuple():
            message.array_value.SetInParent()  # even if it is empty
            for each in value:
                _set(message.array_value.values.add(), each)
        case _:
            raise TypeError(f"an attribute is a {type(value).__name__}")


class _ThinLog(logging.Handler):
    """Passes on one line a minute of what the SDK logs, to Serve's log."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._now_s = now_s
        self._due_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, unless the last one is too recent."""
        now_s = self._now_s()
        if now_s >= self._due_s:
            self._due_s = now_s + LOG_INTERVAL_S
            line = " ".join(record.getMessage().split())[:MAX_LOG_LENGTH]
            logger.warning("traces are not sent, or only in part: %s", line)


def _thin_out_logs() -> None:
    """Thin out what the SDK logs in this process, which repeats itself."""
    sdk = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, _ThinLog) for handler in sdk.handlers):
        sdk.addHandler(_ThinLog())
        sdk.propagate = False
    # It repeats what clients have written into their headers.
    logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
