"""Traces of a real server: a span for each hop, also of requests that are refused or that move."""

from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.faults.served.answer import opened, slow_streams
from tests.faults.served.conftest import NUM_REPLICAS, config
from tests.faults.served.fragile_server import client_of, fragile_server
from tests.faults.served.kinds import about
from tests.faults.served.replicas import Replicas, kill, reached
from tests.otlp_receiver import ReceivedSpan, Receiver, receiving
from tests.ray.serve_run import Server

CHAT = "/v1/chat/completions"
MODEL = "pydoc-chat"
MAX_NUM_SEQS = 2
NUM_TOKENS = 40
BODY = about("os.path.join", max_tokens=NUM_TOKENS, ignore_eos=True, stream=True)
INGRESS, REPLICA = "raystream-ingress", "raystream-replica"
SERVER, CLIENT = 2, 3


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(folder: Path, receiver: Receiver) -> Iterator[Server]:
    document = config()
    args = document["applications"][0]["args"]
    args["tracing"]["otlp_endpoint"] = receiver.url
    args["models"][0] |= {"max_num_seqs": MAX_NUM_SEQS, "max_queued_requests": 0}
    with fragile_server(folder, document) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(server) as client:
        yield client


@pytest.fixture
async def replicas(server: Server, folder: Path) -> Replicas:
    replicas = Replicas(folder)
    await replicas.complete(NUM_REPLICAS)
    await reached(lambda: replicas.are_idle)
    return replicas


def trace_of(receiver: Receiver, number: int, num_spans: int) -> list[ReceivedSpan]:
    return receiver.trace(f"{number:032x}", num_spans)


def parent(number: int) -> Mapping[str, str]:
    return {"traceparent": f"00-{number:032x}-{number:016x}-01", "tracestate": f"test={number}"}


def calls_of(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    return [span for span in spans if span.kind == CLIENT]


def work_under(spans: list[ReceivedSpan], call: ReceivedSpan) -> list[ReceivedSpan]:
    return [span for span in spans if span.parent_id == call.span_id]


async def test_one_request_is_one_trace_of_three_spans(
    client: httpx.AsyncClient, receiver: Receiver, replicas: Replicas
) -> None:
    answer = await client.post(CHAT, json=BODY, headers=dict(parent(1)))
    assert "[DONE]" in answer.text
    spans = trace_of(receiver, 1, 3)
    request, call, work = spans
    assert [(span.service, span.kind) for span in spans] == [
        (INGRESS, SERVER),
        (INGRESS, CLIENT),
        (REPLICA, SERVER),
    ]
    assert [span.parent_id for span in spans] == [f"{1:016x}", request.span_id, call.span_id]
    assert [span.name for span in spans] == [f"POST {CHAT}", f"chat {MODEL}", f"chat {MODEL}"]
    assert call.attributes["raystream.replica.id"] == work.instance_id
    for span in spans:
        assert span.tracestate == "test=1"
        assert (span.events, span.has_failed) == ([], False)
        assert span.attributes["gen_ai.operation.name"] == "chat"
        assert span.attributes["gen_ai.request.model"] == MODEL
        assert span.attributes["gen_ai.usage.input_tokens"] > 0
        assert span.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
        assert span.attributes["gen_ai.response.finish_reasons"] == ["length"]
        assert span.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert work.attributes["gen_ai.latency.time_in_queue"] >= 0
    began_ns, ended_ns = zip(*(span.times_ns for span in spans), strict=True)
    assert list(began_ns) == sorted(began_ns)
    assert ended_ns[0] >= ended_ns[1]


async def test_a_refused_request_has_the_event_at_each_hop(
    client: httpx.AsyncClient, receiver: Receiver, replicas: Replicas
) -> None:
    bodies = [about("os.walk", max_tokens=400, ignore_eos=True)] * (NUM_REPLICAS * MAX_NUM_SEQS)
    async with slow_streams(client, bodies, "traces"):
        answer = await client.post(CHAT, json=BODY, headers=dict(parent(2)))
    assert answer.status_code == 503
    # The ingress's spans come together, its own last; those of the replicas come when they like.
    receiver.wait_for(lambda spans: any(span.parent_id == f"{2:016x}" for span in spans))
    calls = calls_of(trace_of(receiver, 2, 2))
    assert calls
    request, *others = trace_of(receiver, 2, 1 + 2 * len(calls))
    for call in calls:
        (work,) = work_under(others, call)
        assert work.service == REPLICA
        for span in (request, call, work):
            assert span.events == [("refused", {"error.type": "overloaded"})]
            assert span.has_failed


async def test_a_stream_whose_replica_is_killed_goes_on_in_its_trace(
    client: httpx.AsyncClient, receiver: Receiver, replicas: Replicas
) -> None:
    request_id = "slow-moves"
    body = {**BODY, "max_tokens": 200}
    client.headers.update(parent(3))
    async with opened(client, body, request_id=request_id) as stream:
        await stream.read_tokens(5)
        (victim,) = replicas.runs_of(request_id)
        kill(victim)
        answer = await stream.read_to_end()
    assert answer.lost_at
    # The dead replica's span died with it.
    request, *others = trace_of(receiver, 3, 4)
    lost, resumed = calls_of(others)
    moved = ("moved", {"raystream.move.reason": "lost"})
    assert request.events == resumed.events == [moved]
    assert (lost.events, lost.has_failed) == ([], True)
    assert lost.attributes["error.type"] == "replica_unavailable"
    assert work_under(others, lost) == []
    (work,) = work_under(others, resumed)
    assert work.instance_id == resumed.attributes["raystream.replica.id"]
    assert work.instance_id != lost.attributes["raystream.replica.id"]
    num_lost = lost.attributes["gen_ai.usage.output_tokens"]
    assert 5 <= num_lost == 200 - resumed.attributes["gen_ai.usage.output_tokens"]
    assert request.attributes["gen_ai.usage.output_tokens"] == 200
    assert request.attributes["raystream.request.moves"] == 1
    assert not request.has_failed
