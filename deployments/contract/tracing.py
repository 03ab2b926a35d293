"""Traces: spans of what a request does in this process, sent to an OpenTelemetry collector.

A request's spans belong to one trace, whichever processes it passes. Each process gets the context
of the span before its own with the request, as W3C headers write it, and passes its own context on.
Spans hold numbers, and names from our own configuration and code; never a prompt, an answer, a key
or a path.

A span is a plain record until it ends; then `span_export` sends it. `open_tracer` is the one place
that imports that module, and with it the SDK, and only if tracing is on.

Source: https://www.w3.org/TR/trace-context-1/
"""

import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    TraceFlags,
    TraceState,
    format_trace_id,
)

if TYPE_CHECKING:
    from deployments.contract.span_export import SpanExport

__all__ = ["Span", "SpanKind", "TraceContext", "Tracer", "TracingSettings", "open_tracer"]

Attributes = Mapping[str, str | bool | int | float | tuple[str, ...]]

MAX_TRACEPARENT_LENGTH: Final = 128
"""More than twice the length of today's version."""

MAX_TRACESTATE_LENGTH: Final = 512
"""What the standard asks to pass on at least."""

TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
FIRST_VERSION: Final = "00"
"""It ends with the flags; later versions may append fields."""

NO_VERSION: Final = "ff"
NO_STATE: Final = TraceState()
RANDOM_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED | TraceFlags.RANDOM_TRACE_ID)
"""The flags of a trace that begins here, and all flags that are passed on."""

NUM_IDS: Final = 2**64
"""The last 8 bytes of an id decide whether a trace that begins here is recorded, as in the SDK."""


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

    def __init__(
        self,
        export: "SpanExport",
        name: str,
        kind: SpanKind,
        context: SpanContext,
        parent: SpanContext | None,
        attributes: Attributes,
    ) -> None:
        self.started_ns = time.time_ns()
        self._export = export
        self._name = name
        self._kind = kind
        self._context = context
        self._parent = parent
        self._attributes = attributes
        self._events: list[tuple[str, int, Attributes]] = []

    @property
    def trace_id(self) -> str:
        """The trace's id, 32 hexadecimal digits."""
        return format_trace_id(self._context.trace_id)

    @property
    def context(self) -> TraceContext:
        """What the next hop needs."""
        trace_id, span_id, _, flags, state, _ = self._context
        return TraceContext(f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}", state.to_header())

    def add_event(
        self, name: str, attributes: Attributes | None = None, at_ns: int | None = None
    ) -> None:
        """Note that something has happened, now or at a time in Unix nanoseconds."""
        self._events.append((name, time.time_ns() if at_ns is None else at_ns, attributes or {}))

    def end(self, attributes: Attributes, *, name: str | None = None, failed: bool = False) -> None:
        """End the span; nothing may follow.

        Args:
            attributes: Added to those that it started with.
            name: Replaces the name that it started with.
            failed: Whether the server has failed at its work.
        """
        self._export.put(
            name or self._name,
            self._kind,
            self._context,
            self._parent,
            (self.started_ns, time.time_ns()),
            {**self._attributes, **attributes},
            self._events,
            failed=failed,
        )


class Tracer:
    """Starts the spans of one process, and sends them when they have ended."""

    def __init__(self, export: "SpanExport", sample_ratio: float) -> None:
        """Take over what sends spans.

        Args:
            export: Sends spans.
            sample_ratio: See `TracingSettings`.
        """
        self._export = export
        self._sample_ratio = sample_ratio
        # The system's source would let other threads run at each call, and wait for them.
        self._random = random.Random()

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
        above = None if parent is None else _parsed(parent)
        if above is None:
            trace_id, flags, state = self._random.getrandbits(128), RANDOM_SAMPLED, NO_STATE
            is_recorded = _is_sampled(trace_id, self._sample_ratio)
        else:
            trace_id, _, _, flags, state, _ = above
            is_recorded = flags.sampled
        if not is_recorded:
            return None
        context = SpanContext(trace_id, self._random.getrandbits(64), False, flags, state)
        return Span(self._export, name, kind, context, above, attributes)

    def flush(self) -> bool:
        """Send all spans that have ended, and wait for that; return whether there was time."""
        return self._export.flush()

    def close(self) -> None:
        """Send what is left, within a second; closing twice is harmless."""
        self._export.close()


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
    from deployments.contract.span_export import SpanExport

    export = SpanExport(settings.otlp_endpoint, service, instance_id)
    return Tracer(export, settings.sample_ratio)


def _is_sampled(trace_id: int, ratio: float) -> bool:
    return trace_id % NUM_IDS < round(ratio * NUM_IDS)


def _parsed(context: TraceContext) -> SpanContext | None:
    """Return the ids of a context; None if it is not valid.

    Source: https://www.w3.org/TR/trace-context-1/#traceparent-header-field-values
    """
    if len(context.traceparent) > MAX_TRACEPARENT_LENGTH:
        return None
    found = TRACEPARENT.fullmatch(context.traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == NO_VERSION or (version == FIRST_VERSION and more is not None):
        return None
    state = NO_STATE
    if context.tracestate and len(context.tracestate) <= MAX_TRACESTATE_LENGTH:
        state = TraceState.from_header([context.tracestate])
    known_flags = TraceFlags(int(flags, 16) & RANDOM_SAMPLED)
    parsed = SpanContext(int(trace_id, 16), int(span_id, 16), True, known_flags, state)
    return parsed if parsed.is_valid else None
