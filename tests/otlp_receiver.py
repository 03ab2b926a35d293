"""An OpenTelemetry collector in this process: it keeps the spans that it gets over OTLP/HTTP."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Event
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from tests.threaded_server import answering

DEADLINE_S = 60


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as a collector sees it."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str  # empty for the first span of a trace
    tracestate: str
    service: str  # the name of the service that it comes from
    instance_id: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]  # the attributes of each event, by its name, in order
    has_failed: bool
    times_ns: tuple[int, int]  # when it began and ended, in Unix nanoseconds


@dataclass
class Receiver:
    """What a collector has got."""

    url: str = ""  # where it listens
    bodies: list[bytes] = field(default_factory=list)  # all requests, as they came
    headers: list[dict[str, str]] = field(default_factory=list)  # the headers of each
    _changed: Condition = field(default_factory=Condition)
    _decoded: list[ReceivedSpan] = field(default_factory=list)
    _num_decoded: int = 0  # bodies

    @property
    def spans(self) -> list[ReceivedSpan]:
        """All spans, in the order of their arrival."""
        with self._changed:
            for body in self.bodies[self._num_decoded :]:
                self._decoded += _spans_of(ExportTraceServiceRequest.FromString(body))
            self._num_decoded = len(self.bodies)
            return list(self._decoded)

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        """Keep a request; it is decoded when a test asks for spans."""
        assert path == "/v1/traces"
        with self._changed:
            self.bodies.append(body)
            self.headers.append(headers)
            self._changed.notify_all()

    def wait_for(self, is_enough: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """Return all spans once they are enough."""
        with self._changed:
            came = self._changed.wait_for(lambda: is_enough(self.spans), DEADLINE_S)
        assert came, [(span.service, span.name) for span in self.spans]
        return self.spans

    def trace(self, trace_id: str, num_spans: int) -> list[ReceivedSpan]:
        """Return the spans of a trace, the earliest first, once there are this many."""

        def found() -> list[ReceivedSpan]:
            return [span for span in self.spans if span.trace_id == trace_id]

        self.wait_for(lambda _: len(found()) >= num_spans)
        return sorted(found(), key=lambda span: span.times_ns)


@contextmanager
def receiving(answers: Event | None = None) -> Iterator[Receiver]:
    """Receive spans until the block ends; until `answers` is set, nothing is answered."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.take(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            if answers is not None:
                answers.wait(DEADLINE_S)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    with answering(server):
        yield receiver


def _spans_of(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource_spans in request.resource_spans:
        resource = _mapping(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield ReceivedSpan(
                    name=span.name,
                    kind=span.kind,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    tracestate=span.trace_state,
                    service=resource["service.name"],
                    instance_id=resource["service.instance.id"],
                    attributes=_mapping(span.attributes),
                    events=[(each.name, _mapping(each.attributes)) for each in span.events],
                    has_failed=span.status.code == 2,
                    times_ns=(span.start_time_unix_nano, span.end_time_unix_nano),
                )


def _mapping(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
