"""Traces: spans of what a request does in this process, sent to an OpenTelemetry collector.

A request's spans belong to one trace, whichever processes it passes. Each process gets the context
of the span before its own with the request, as W3C headers write it, and passes its own context on.
Spans hold numbers, and names from our own configuration and code; never a prompt, an answer, a key
or a path.

Spans are OpenTelemetry's own, from a provider of this process; the global provider is neither set
nor used. Only `open_tracer` imports the SDK, and only if tracing is on.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Final

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = [
    "Span",
    "SpanKind",
    "TraceContext",
    "Tracer",
    "TracingSettings",
    "context_of",
    "open_tracer",
]

logger = logging.getLogger("ray.serve.raystream.tracing")

EXPORT_INTERVAL_S: Final = 1.0
"""The longest time between two exports; a killed process loses the spans since the last one."""

FLUSH_S: Final = 0.9
"""How long the end of a process waits for its last spans."""

LOG_INTERVAL_S: Final = 60.0
"""The SDK logs each failed export and each dropped span; one line in this time is passed on."""

MAX_LOG_LENGTH: Final = 300

MAX_QUEUED_SPANS: Final = 2048
MAX_BATCH_SPANS: Final = 512
MAX_SPAN_ITEMS: Final = 128
"""The SDK's defaults. Passed to it, because values of its variables that do not go together, or are
not valid, would stop the process."""

W3C: Final = TraceContextTextMapPropagator()
"""Reads and writes the headers `traceparent` and `tracestate`."""


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


def context_of(span: Span) -> TraceContext:
    """Return what the next hop needs."""
    headers: dict[str, str] = {}
    W3C.inject(headers, set_span_in_context(span, Context()))
    return TraceContext(**headers)


class Tracer:
    """Starts the spans of one process, and sends them when they have ended.

    Attributes:
        provider: The SDK's provider of this process.
    """

    def __init__(self, provider: "TracerProvider") -> None:
        """Take over the provider, which ends with the tracer."""
        self.provider = provider
        self._tracer = provider.get_tracer("raystream")

    def start(
        self,
        name: str,
        kind: SpanKind,
        parent: TraceContext | None,
        attributes: Mapping[str, str],
    ) -> Span | None:
        """Start a span; return None if its trace is not recorded.

        Args:
            name: The span's name.
            kind: Whether it answers a call or makes one.
            parent: The context of the hop before; None, or one that is not valid, begins a trace.
            attributes: What is known at the start.
        """
        headers = {}
        if parent is not None:
            headers = {"traceparent": parent.traceparent, "tracestate": parent.tracestate}
        above = W3C.extract(headers, Context())
        span = self._tracer.start_span(name, above, kind, attributes)
        return span if span.is_recording() else None

    def close(self) -> None:
        """Send what is left, within a second; closing twice is harmless."""
        # The SDK's own limit is half a minute, which a dead collector would use up. The thread ends
        # with the process.
        closing = Thread(target=self.provider.shutdown, name="last-spans", daemon=True)
        closing.start()
        closing.join(FLUSH_S)


def open_tracer(settings: TracingSettings | None, service: str, instance_id: str) -> Tracer | None:
    """Return a tracer that sends its spans to a collector; None if tracing is off.

    `OTEL_SDK_DISABLED=true` turns tracing off with a warning, although there are settings.
    Credentials and certificates of the collector come from the variables that the SDK reads:
    `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_CERTIFICATE` and others.

    Args:
        settings: Where spans go; None turns tracing off.
        service: What this process is part of, as traces name it.
        instance_id: Identifies this process among those of the service.
    """
    if settings is None:
        return None
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        logger.warning("no traces are sent: OTEL_SDK_DISABLED is true in the environment")
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    _thin_out_logs()
    names = {
        "service.name": service,
        "service.namespace": "raystream",
        "service.instance.id": instance_id,
    }
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        resource=Resource.create(names),
        span_limits=SpanLimits(
            max_attributes=MAX_SPAN_ITEMS,
            max_events=MAX_SPAN_ITEMS,
            max_links=MAX_SPAN_ITEMS,
            max_span_attributes=MAX_SPAN_ITEMS,
            max_event_attributes=MAX_SPAN_ITEMS,
            max_link_attributes=MAX_SPAN_ITEMS,
            max_attribute_length=SpanLimits.UNSET,
            max_span_attribute_length=SpanLimits.UNSET,
        ),
        shutdown_on_exit=False,  # it would wait half a minute for a dead collector
    )
    exporter = OTLPSpanExporter(f"{settings.otlp_endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            schedule_delay_millis=1e3 * EXPORT_INTERVAL_S,
            max_export_batch_size=MAX_BATCH_SPANS,
        )
    )
    return Tracer(provider)


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
