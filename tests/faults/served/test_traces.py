"""Traces of a real server: a span for each hop, also of requests that are refused or that move."""

from itertools import chain

from tests.faults.served.crowd import Pressed
from tests.faults.served.in_halves import CHAT
from tests.faults.served.kinds import MODEL
from tests.faults.served.tracing import CLIENT, calls_of, request_of, trace_of, work_under
from tests.faults.served.two_deaths import TRACE, TRACED, TRACES, TwoDeaths
from tests.otlp_receiver import ReceivedSpan, Receiver

INGRESS, REPLICA = "raystream-ingress", "raystream-replica"
SERVER = 2


def test_one_request_is_one_trace_of_three_spans(deaths: TwoDeaths, receiver: Receiver) -> None:
    spans = trace_of(receiver, TRACE, 3)
    request, call, work = spans
    assert [(span.service, span.kind) for span in spans] == [
        (INGRESS, SERVER),
        (INGRESS, CLIENT),
        (REPLICA, SERVER),
    ]
    assert [span.parent_id for span in spans] == [f"{TRACE:016x}", request.span_id, call.span_id]
    assert [span.name for span in spans] == [f"POST {CHAT}", f"chat {MODEL}", f"chat {MODEL}"]
    assert call.attributes["raystream.replica.id"] == work.instance_id
    for span in spans:
        assert span.tracestate == f"test={TRACE}"
        assert (span.events, span.has_failed) == ([], False)
        assert span.attributes["gen_ai.operation.name"] == "chat"
        assert span.attributes["gen_ai.request.model"] == MODEL
        assert span.attributes["gen_ai.usage.input_tokens"] > 0
        assert span.attributes["gen_ai.usage.output_tokens"] == TRACED["max_tokens"]
        assert span.attributes["gen_ai.response.finish_reasons"] == ["length"]
        assert span.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert work.attributes["gen_ai.latency.time_in_queue"] >= 0
    began_ns, ended_ns = zip(*(span.times_ns for span in spans), strict=True)
    assert list(began_ns) == sorted(began_ns)
    assert ended_ns[0] >= ended_ns[1]


def test_a_refused_request_has_the_event_at_each_hop(crowd: Pressed, receiver: Receiver) -> None:
    def hops(number: int) -> list[ReceivedSpan]:
        """Return the spans of a trace if there are those of all its hops."""
        spans = [span for span in receiver.spans if span.trace_id == f"{number:032x}"]
        calls = calls_of(spans)
        is_complete = calls and all(len(work_under(spans, call)) == 1 for call in calls)
        return spans if is_complete and len(spans) == 1 + 2 * len(calls) else []

    def complete() -> list[list[ReceivedSpan]]:
        return [spans for number in crowd.crowd.refused_traces if (spans := hops(number))]

    # The replica that died has taken its latest spans with it.
    receiver.wait_for(lambda _: bool(complete()))
    for span in chain.from_iterable(complete()):
        assert span.events == [("refused", {"error.type": "overloaded"})]
        assert span.has_failed


def test_a_stream_whose_replicas_are_killed_goes_on_in_its_trace(
    deaths: TwoDeaths, receiver: Receiver
) -> None:
    name = "greedy"
    answer, number = deaths.answers[name], TRACES[name]
    request = request_of(receiver, number)
    moved = [("moved", {"raystream.move.reason": "lost"})]
    assert request.events == moved * len(answer.lost_at)
    assert request.attributes["raystream.request.moves"] == len(answer.lost_at)
    assert request.attributes["gen_ai.usage.output_tokens"] == answer.num_tokens
    assert not request.has_failed
    *earlier, resumed = calls_of(trace_of(receiver, number, 2))
    receiver.wait_for(lambda spans: bool(work_under(spans, resumed)))
    lost = [call for call in earlier if call.has_failed]
    assert lost
    for call in lost:
        assert call.attributes["error.type"] == "replica_unavailable"
        # The dead replicas' spans died with them.
        assert work_under(receiver.spans, call) == []
    assert resumed.events == moved
    (work,) = work_under(receiver.spans, resumed)
    assert work.instance_id == resumed.attributes["raystream.replica.id"]
    assert work.instance_id not in [call.attributes.get("raystream.replica.id") for call in lost]
    # While no replica was left, the ingress gave up calls that none had taken.
    assert all(
        call.attributes.get("gen_ai.usage.output_tokens", 0) == 0
        for call in earlier
        if call not in lost
    )
    calls = [*lost, resumed]
    num_tokens = [call.attributes.get("gen_ai.usage.output_tokens", 0) for call in calls]
    assert sum(num_tokens) == answer.num_tokens
