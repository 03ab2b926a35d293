import asyncio
import json
import logging
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from deployments.contract.errors import GenerationFailedError, OverloadedError
from deployments.contract.telemetry.tracing import Tracer, TracingSettings, open_tracer
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.otlp_receiver import ReceivedSpan, Receiver, receiving
from tests.serve_app.apps import CHAT, access_lines, client_of, question, ring
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fakes import HELLO, FakeBackend, FakeClock

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
SECRET = "squeamish-ossifrage"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def tracer(receiver: Receiver) -> Iterator[Tracer]:
    tracer = open_tracer(TracingSettings(receiver.url), "raystream-ingress", "i")
    assert tracer is not None
    yield tracer
    tracer.close()


def traced_app(backend: FakeBackend, tracer: Tracer, has_keys: bool = False) -> FastAPI:
    config = AppConfig.model_validate({"models": [{"id": "m", "source": "nowhere"}]})
    keys = ring() if has_keys else None
    return build_app(AppParts(config, {"m": backend}, clock=FakeClock(), keys=keys, tracer=tracer))


def received(tracer: Tracer, receiver: Receiver) -> list[ReceivedSpan]:
    tracer.close()
    return receiver.spans


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_s_span_says_what_the_access_log_says(
    backend: FakeBackend,
    tracer: Tracer,
    receiver: Receiver,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    caplog.set_level(logging.INFO)
    headers = {"x-request-id": "abc", "traceparent": PARENT, "tracestate": "a=1"}
    async with client_of(traced_app(backend, tracer)) as client:
        await client.post(CHAT, json=question(stream=stream), headers=headers)
    (line,) = access_lines(caplog)
    assert line["trace_id"] == TRACE_ID
    (span,) = received(tracer, receiver)
    assert (span.name, span.kind, span.has_failed) == (f"POST {CHAT}", 2, False)
    assert (span.trace_id, span.parent_id, span.tracestate) == (TRACE_ID, PARENT_ID, "a=1")
    first_s = span.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert first_s * 1000 == pytest.approx(line["ttft_ms"], abs=0.1)
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "raystream.request.id": "abc",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "raystream",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ["stop"],
    }
    assert span.events == []
    (request,) = backend.requests
    assert request.trace is not None
    assert request.trace.traceparent == f"00-{TRACE_ID}-{span.span_id}-01"
    assert request.trace.tracestate == "a=1"


async def test_a_stream_s_span_ends_with_its_last_byte(tracer: Tracer, receiver: Receiver) -> None:
    goes_on = asyncio.Event()
    app = traced_app(FakeBackend([HELLO[0], goes_on, *HELLO[1:]]), tracer)
    async with AsgiCall(app, CHAT, question(stream=True)) as call:
        await call.wait_until(lambda: b"Hello" in call.body)
        assert tracer.provider.force_flush()
        assert receiver.spans == []
        goes_on.set()
        await call.end()
    (span,) = received(tracer, receiver)
    assert span.attributes["gen_ai.usage.output_tokens"] == 5


async def test_a_stream_s_span_ends_when_its_client_leaves(
    tracer: Tracer, receiver: Receiver
) -> None:
    app = traced_app(FakeBackend([HELLO[0], asyncio.Event()]), tracer)
    async with AsgiCall(app, CHAT, question(stream=True)) as call:
        await call.wait_until(lambda: b"Hello" in call.body)
        call.leave()
        await call.end()
    (span,) = received(tracer, receiver)
    assert span.attributes["raystream.request.client_left"] is True
    assert span.attributes["gen_ai.usage.output_tokens"] == 1
    assert "gen_ai.response.finish_reasons" not in span.attributes
    assert not span.has_failed


async def test_a_refusal_is_an_event(
    backend: FakeBackend, tracer: Tracer, receiver: Receiver
) -> None:
    backend.refusal = OverloadedError("full", None, 3)
    async with client_of(traced_app(backend, tracer)) as client:
        assert (await client.post(CHAT, json=question())).status_code == 503
    (span,) = received(tracer, receiver)
    assert span.events == [("refused", {"error.type": "overloaded"})]
    assert span.attributes["error.type"] == "overloaded"
    assert span.has_failed


async def test_a_stream_that_breaks_has_failed(tracer: Tracer, receiver: Receiver) -> None:
    app = traced_app(FakeBackend([HELLO[0], GenerationFailedError("broken")]), tracer)
    async with client_of(app) as client:
        assert (await client.post(CHAT, json=question(stream=True))).status_code == 200
    (span,) = received(tracer, receiver)
    assert (span.attributes["error.type"], span.has_failed) == ("generation_failed", True)


async def test_a_client_s_mistake_is_no_failure_and_its_path_is_not_told(
    backend: FakeBackend, tracer: Tracer, receiver: Receiver
) -> None:
    async with client_of(traced_app(backend, tracer, has_keys=True)) as client:
        assert (await client.post(f"/v1/{SECRET}", json={})).status_code == 401
    async with client_of(traced_app(backend, tracer)) as client:
        assert (await client.post(f"/v1/{SECRET}", json={})).status_code == 404
        assert (await client.post(CHAT, json={"model": SECRET})).status_code == 400
        await client.ask(CHAT, question(model=SECRET), 404)
    spans = received(tracer, receiver)
    assert [(span.name, span.has_failed) for span in spans] == [
        ("POST", False),
        ("POST", False),
        (f"POST {CHAT}", False),
        (f"POST {CHAT}", False),
    ]
    assert SECRET.encode() not in b"".join(receiver.bodies)


async def test_only_post_is_traced(
    backend: FakeBackend, tracer: Tracer, receiver: Receiver
) -> None:
    async with client_of(traced_app(backend, tracer)) as client:
        for path in ("/health", "/live", "/v1/models", "/v1/models/m", "/nowhere"):
            await client.get(path, headers={"traceparent": PARENT})
    assert received(tracer, receiver) == []


async def test_a_client_that_is_not_sampled_is_not_traced(
    backend: FakeBackend, tracer: Tracer, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with client_of(traced_app(backend, tracer)) as client:
        await client.post(CHAT, json=question(), headers={"traceparent": f"{PARENT[:-1]}0"})
    assert received(tracer, receiver) == []
    (line,) = access_lines(caplog)
    assert "trace_id" not in line
    assert backend.requests[0].trace is None


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", PARENT), ("traceparent", PARENT)],
        [("traceparent", "x" * 10_000)],
        [("traceparent", "\xff\x80")],
        [("traceparent", ""), ("tracestate", "=,=,=")],
        [("tracestate", "a=1")],
    ],
)
async def test_a_hostile_context_fails_no_request(
    backend: FakeBackend, tracer: Tracer, receiver: Receiver, headers: list[tuple[str, str]]
) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    async with client_of(traced_app(backend, tracer)) as client:
        assert (await client.post(CHAT, json=question(), headers=raw)).status_code == 200
    (span,) = received(tracer, receiver)
    assert (span.parent_id, span.tracestate) == ("", "")


async def test_several_tracestates_are_one(
    backend: FakeBackend, tracer: Tracer, receiver: Receiver
) -> None:
    headers = [("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")]
    async with client_of(traced_app(backend, tracer)) as client:
        await client.post(CHAT, json=question(), headers=headers)
    (span,) = received(tracer, receiver)
    assert span.tracestate == "a=1,b=2"


async def test_without_a_tracer_a_client_s_context_is_ignored(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = AppConfig.model_validate({"models": [{"id": "m", "source": "nowhere"}]})
    async with client_of(build_app(AppParts(config, {"m": backend}, clock=FakeClock()))) as client:
        await client.post(CHAT, json=question(), headers={"traceparent": PARENT})
    assert backend.requests[0].trace is None
    assert "trace_id" not in json.dumps(access_lines(caplog))


async def test_a_global_tracer_provider_gets_nothing_from_the_web_framework(
    backend: FakeBackend, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    async with client_of(traced_app(backend, tracer)) as client:
        answer = await client.get("/v1/models", params={"token": SECRET})
    assert answer.status_code == 200
    assert exporter.get_finished_spans() == ()
