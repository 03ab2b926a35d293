"""Spans of the server under test, as its collector gets them."""

from collections.abc import Mapping

from tests.otlp_receiver import ReceivedSpan, Receiver

CLIENT = 3
"""OpenTelemetry's number of the kind; 2 is a server's."""


def parent(number: int, is_sampled: bool = True) -> Mapping[str, str]:
    """Return the headers by which a request belongs to the trace with a number."""
    trace = f"00-{number:032x}-{number:016x}-{is_sampled:02x}"
    return {"traceparent": trace, "tracestate": f"test={number}"}


def trace_of(receiver: Receiver, number: int, num_spans: int) -> list[ReceivedSpan]:
    """Return the spans of a trace once there are this many, the earliest first."""
    return receiver.trace(f"{number:032x}", num_spans)


def request_of(receiver: Receiver, number: int) -> ReceivedSpan:
    """Return the ingress's own span of a request, once it has come; its calls' come before."""

    def found(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
        ids = (f"{number:032x}", f"{number:016x}")
        return [span for span in spans if (span.trace_id, span.parent_id) == ids]

    (request,) = found(receiver.wait_for(lambda spans: bool(found(spans))))
    return request


def calls_of(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    """Return the ingress's calls of replicas."""
    return [span for span in spans if span.kind == CLIENT]


def work_under(spans: list[ReceivedSpan], call: ReceivedSpan) -> list[ReceivedSpan]:
    """Return the replica's span of a call; a dead replica sends none."""
    return [span for span in spans if span.parent_id == call.span_id]
