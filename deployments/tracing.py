"""Traces: spans of what a request does in this process, sent to an OpenTelemetry collector.

A request's spans belong to one trace, whichever processes it passes. Each process gets the context
of the span before its own with the request, as W3C headers write it, and passes its own context on.
Spans hold numbers, and names from our own configuration and code; never a prompt, an answer, a key
or a path.

`open_tracer` is the one place that imports the SDK's exporter, and only if tracing is on. Spans
leave in batches from a thread of their own, through a queue that drops spans when it is full.

Source: https://www.w3.org/TR/trace-context-1/
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["Span", "SpanKind", "TraceContext", "Tracer", "TracingSettings", "open_tracer"]

logger = logging.getLogger("ray.serve.raystream.tracing")

Attributes = Mapping[str, str | bool | int | float | tuple[str, ...]]

MAX_TRACEPARENT_LENGTH: Final = 128
"""More than twice the length of today's version; later versions may append fields."""

MAX_TRACESTATE_LENGTH: Final = 512
"""What the standard asks to pass on at least."""

MAX_QUEUED_SPANS: Final = 2048
MAX_BATCH_SPANS: Final = 512
EXPORT_INTERVAL_S: Final = 1.0
"""The longest time between two exports; a killed process loses the spans since the last one."""

FLUSH_S: Final = 0.9
"""How long the end of a process waits for its last spans."""

LOG_INTERVAL_S: Final = 60.0
"""The SDK logs each failed export and each dropped span; one line in this time is passed on."""

MAX_LOG_LENGTH: Final = 300

_PROPAGATOR: Final = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """Where spans go, and how many.

    Attributes:
        otlp_endpoint: The collector's URL for OTLP over HTTP, without `/v1/traces`.
        sample_ratio: The part of the traces that begin here which are recorded, 0 to 1.
    """

    otlp_endpoint: str
    sample_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The span that the next hop's span belongs under.

    Attributes:
        traceparent: As in the header of that name. One that is not valid begins a new trace.
        tracestate: As in the header of that name; what other systems add to the trace.
        moved: Why the request has left another replica; None unless it has.
    """

    traceparent: str
    tracestate: str = ""
    moved: str | None = None


class Span:
    """A span that is recorded.

    Attributes:
        started_ns: When it started, in Unix nanoseconds.
    """

    def __init__(self, span: trace.Span, started_ns: int) -> None:
        self._span = span
        self.started_ns = started_ns

    @property
    def trace_id(self) -> str:
        """The trace's id, 32 hexadecimal digits."""
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    @property
    def context(self) -> TraceContext:
        """What the next hop needs."""
        own = self._span.get_span_context()
        return TraceContext(
            f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}",
            own.trace_state.to_header(),
        )

    def add_event(
        self, name: str, attributes: Attributes | None = None, at_ns: int | None = None
    ) -> None:
        """Note that something has happened, now or at a time in Unix nanoseconds."""
        self._span.add_event(name, attributes, at_ns)

    def end(self, attributes: Attributes, *, name: str | None = None, failed: bool = False) -> None:
        """End the span; nothing may follow.

        Args:
            attributes: Added to those that it started with.
            name: Replaces the name that it started with.
            failed: Whether the server has failed at its work.
        """
        if name is not None:
            self._span.update_name(name)
        if failed:
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.set_attributes(attributes)
        self._span.end()


class Tracer:
    """Starts the spans of one process, and sends them when they have ended."""

    def __init__(self, provider: "TracerProvider") -> None:
        """Take over a provider of the SDK, which makes spans and queues those that have ended."""
        self._provider = provider
        self._tracer = provider.get_tracer("raystream")
        self._is_closed = False

    def start(
        self, name: str, kind: SpanKind, parent: TraceContext | None, attributes: Attributes
    ) -> Span | None:
        """Start a span; return None if its trace is not recorded.

        Args:
            name: The span's name.
            kind: Whether it answers a call or makes one.
            parent: The context of the hop before; None, or one that is not valid, begins a trace.
            attributes: What is known at the start.
        """
        started_ns = time.time_ns()
        span = self._tracer.start_span(
            name, _extracted(parent), kind, attributes, start_time=started_ns
        )
        return Span(span, started_ns) if span.is_recording() else None

    def close(self) -> None:
        """Send what is left, within a second; closing twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        # The SDK's own limit is half a minute, which a dead collector would use up. The thread ends
        # with the process.
        closing = Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        closing.start()
        closing.join(FLUSH_S)


def open_tracer(settings: TracingSettings | None, service: str, instance_id: str) -> Tracer | None:
    """Return a tracer that sends its spans to a collector; None if tracing is off.

    Credentials and certificates of the collector come from the variables that the SDK reads:
    `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_CERTIFICATE` and others.

    Args:
        settings: Where spans go; None turns tracing off.
        service: What this process is part of, as traces name it.
        instance_id: Identifies this process among those of the service.
    """
    if settings is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    _thin_out_logs()
    exporter = OTLPSpanExporter(f"{settings.otlp_endpoint.rstrip('/')}/v1/traces")
    names = {
        "service.name": service,
        "service.namespace": "raystream",
        "service.instance.id": instance_id,
    }
    provider = TracerProvider(
        ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        Resource.create(names),
        shutdown_on_exit=False,  # it could delay the exit by half a minute; `close` bounds that
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            schedule_delay_millis=1e3 * EXPORT_INTERVAL_S,
            max_export_batch_size=MAX_BATCH_SPANS,
        )
    )
    return Tracer(provider)


def _extracted(parent: TraceContext | None) -> Context:
    """Return the SDK's form of a context; an empty one if it is not valid."""
    if parent is None or len(parent.traceparent) > MAX_TRACEPARENT_LENGTH:
        return Context()
    carrier = {"traceparent": parent.traceparent}
    if parent.tracestate and len(parent.tracestate) <= MAX_TRACESTATE_LENGTH:
        carrier["tracestate"] = parent.tracestate
    return _PROPAGATOR.extract(carrier, Context())


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
