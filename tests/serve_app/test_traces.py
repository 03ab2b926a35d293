"""A request's trace over all hops: the application, its calls, and replicas in this process."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest

from deployments.contract.gen_ai_spans import ModelSpans
from deployments.contract.generation import GenerationRequest
from deployments.contract.sampling_params import SamplingParams
from deployments.contract.telemetry.tracing import SpanKind, Tracer, TracingSettings, open_tracer
from deployments.generator_replica import GeneratorReplica
from raystream.local_handle import LocalHandle
from serve_app.backends.replicas.handle_backend import HandleBackend
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.deployments.tiny_folder import save_text_model
from tests.faults.cut_replicas import Cut, Cuts, Router
from tests.otlp_receiver import ReceivedSpan, Receiver, receiving
from tests.serve_app import apps
from tests.serve_app.apps import CHAT, AppClient, question
from tests.serve_app.fakes import FakeBackend
from tests.serve_app.local_replica import local_generator

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

SERVER, CLIENT = 2, 3
SECRET = "squeamish-ossifrage"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def tracer(receiver: Receiver) -> Iterator[Tracer]:
    tracer = open_tracer(TracingSettings(receiver.url), "raystream-ingress", "i")
    assert tracer is not None
    yield tracer
    tracer.close()


@pytest.fixture(scope="module")
def cuts() -> Cuts:
    return Cuts()


@pytest.fixture(scope="module")
def replicas(
    receiver: Receiver, cuts: Cuts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[GeneratorReplica]]:
    folder = save_text_model(tmp_path_factory.mktemp("qwen2"))
    changes: dict[str, Any] = {"tracing": TracingSettings(receiver.url), "max_num_seqs": 1}
    with ExitStack() as stack:
        made = [
            stack.enter_context(local_generator(folder, max_queued_requests=1, **changes))
            for _ in range(2)
        ]
        for generator in made:
            cuts.wrap(generator)
        yield made


@asynccontextmanager
async def client_of(
    replicas: list[GeneratorReplica], tracer: Tracer
) -> AsyncIterator[httpx.AsyncClient]:
    spans = ModelSpans(tracer, "m", SpanKind.CLIENT)
    async with AsyncExitStack() as stack:
        backends = [
            await stack.enter_async_context(
                aclosing(
                    HandleBackend(cast("DeploymentHandle[Any]", LocalHandle(each)), spans=spans)
                )
            )
            for each in replicas
        ]
        config = AppConfig.model_validate({"models": [{"id": "m", "source": "nowhere"}]})
        app: Any = build_app(AppParts(config, {"m": Router(backends)}, tracer=tracer))
        transport = httpx.ASGITransport(app)
        yield await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://test", timeout=None)
        )


@pytest.fixture
async def client(
    replicas: list[GeneratorReplica], tracer: Tracer
) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(replicas, tracer) as client:
        yield client


def parent(number: int) -> dict[str, str]:
    return {"traceparent": f"00-{number:032x}-{number:016x}-01"}


def by_hop(spans: list[ReceivedSpan]) -> list[tuple[str, int]]:
    return [(span.service, span.kind) for span in spans]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_s_trace_has_a_span_for_each_hop(
    client: AppClient, receiver: Receiver, stream: bool
) -> None:
    number = 1 + stream
    body = question(max_tokens=4, ignore_eos=True, stream=stream)
    answer = await client.post(CHAT, json=body, headers=parent(number))
    assert answer.status_code == 200
    spans = receiver.trace(f"{number:032x}", 3)
    request, call, work = spans
    assert by_hop(spans) == [
        ("raystream-ingress", SERVER),
        ("raystream-ingress", CLIENT),
        ("raystream-replica", SERVER),
    ]
    assert request.parent_id == f"{number:016x}"
    assert (call.parent_id, work.parent_id) == (request.span_id, call.span_id)
    assert (request.name, call.name, work.name) == (f"POST {CHAT}", "chat m", "chat m")
    assert call.attributes["raystream.replica.id"] == work.instance_id
    for span in spans:
        assert span.events == []
        assert not span.has_failed
        assert span.attributes["gen_ai.operation.name"] == "chat"
        assert span.attributes["gen_ai.request.model"] == "m"
        assert span.attributes["gen_ai.usage.input_tokens"] > 0
        assert span.attributes["gen_ai.usage.output_tokens"] == 4
        assert span.attributes["gen_ai.response.finish_reasons"] == ["length"]
        assert span.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert (
        0
        < work.attributes["gen_ai.latency.time_in_queue"]
        < work.attributes["gen_ai.response.time_to_first_chunk"]
    )


async def test_each_answer_has_a_call_of_its_own(client: AppClient, receiver: Receiver) -> None:
    body = question(max_tokens=2, ignore_eos=True, n=2)
    assert (await client.post(CHAT, json=body, headers=parent(3))).status_code == 200
    spans = receiver.trace(f"{3:032x}", 5)
    request, *others = spans
    calls = [span for span in others if span.kind == CLIENT]
    assert {call.parent_id for call in calls} == {request.span_id}
    assert {span.parent_id for span in others if span.kind == SERVER} == {
        call.span_id for call in calls
    }
    assert request.attributes["gen_ai.usage.output_tokens"] == 4


@pytest.mark.parametrize(
    ("is_death", "reason", "code"),
    [(True, "lost", "replica_unavailable"), (False, "stopped", "generation_aborted")],
)
async def test_a_stream_that_moves_stays_in_its_trace(
    client: AppClient, receiver: Receiver, cuts: Cuts, is_death: bool, reason: str, code: str
) -> None:
    number = 4 + is_death
    cuts.plan(f"moves{number}", [Cut(2, is_death)])
    body = question(max_tokens=6, ignore_eos=True, stream=True)
    headers = {**parent(number), "x-request-id": f"moves{number}"}
    assert "[DONE]" in (await client.post(CHAT, json=body, headers=headers)).text
    spans = receiver.trace(f"{number:032x}", 5)
    request = spans[0]
    lost, resumed = (span for span in spans if span.kind == CLIENT)
    assert lost.parent_id == resumed.parent_id == request.span_id
    moved = ("moved", {"raystream.move.reason": reason})
    assert request.events == [moved]
    assert resumed.events == [moved]
    assert lost.events == []
    assert lost.has_failed
    assert lost.attributes["error.type"] == code
    assert lost.attributes["gen_ai.usage.output_tokens"] == 2
    assert resumed.attributes["gen_ai.usage.output_tokens"] == 4
    assert request.attributes["gen_ai.usage.output_tokens"] == 6
    assert request.attributes["raystream.request.moves"] == 1
    assert not request.has_failed


async def test_a_refusal_is_an_event_of_each_hop(
    replicas: list[GeneratorReplica], tracer: Tracer, receiver: Receiver
) -> None:
    async with client_of(replicas[:1], tracer) as client:
        with ExitStack() as places:
            for _ in range(2):  # one runs, one waits
                other = GenerationRequest("other", "hello", SamplingParams())
                places.enter_context(replicas[0]._admission.permit(other))
            refused = await client.post(CHAT, json=question(), headers=parent(6))
        assert refused.status_code == 503
    spans = receiver.trace(f"{6:032x}", 3)
    assert len(spans) == 3
    for span in spans:
        assert span.events == [("refused", {"error.type": "overloaded"})]
        assert span.has_failed


async def test_nothing_of_prompts_and_answers_is_told(
    replicas: list[GeneratorReplica], client: AppClient, receiver: Receiver
) -> None:
    answers = []
    for number, body in enumerate(
        (
            question(messages=[{"role": "user", "content": SECRET}], user=SECRET),
            question(stop=[SECRET], metadata={"a": SECRET}),
            question(response_format={"type": "json_schema", "json_schema": {"name": SECRET}}),
            question(structured_outputs={"choice": [SECRET]}, max_tokens=60),
        ),
        start=16,
    ):
        headers = {**parent(number), "authorization": f"Bearer {SECRET}", "user-agent": SECRET}
        path = f"{CHAT}?key={SECRET}"
        answers.append((await client.post(path, json=body, headers=headers)).text)
        receiver.trace(f"{number:032x}", 1)
    assert SECRET in answers[-1]
    for generator in replicas:
        assert generator._tracer is not None
        assert generator._tracer.provider.force_flush()
    receiver.trace(f"{19:032x}", 3)
    assert SECRET.encode() not in b"".join(receiver.bodies)


async def test_a_replica_that_ends_sends_its_last_spans(
    tracer: Tracer, tmp_path: Path, receiver: Receiver
) -> None:
    folder = save_text_model(tmp_path)
    number = 32
    with local_generator(folder, tracing=TracingSettings(receiver.url)) as generator:
        async with client_of([generator], tracer) as client:
            await client.post(CHAT, json=question(max_tokens=1), headers=parent(number))
    services = [span.service for span in receiver.spans if span.trace_id == f"{number:032x}"]
    assert "raystream-replica" in services


async def test_an_ingress_that_ends_sends_its_last_spans(receiver: Receiver) -> None:
    tracer = open_tracer(TracingSettings(receiver.url), "raystream-ingress", "i")
    config = AppConfig.model_validate({"models": [{"id": "m", "source": "nowhere"}]})
    app = build_app(AppParts(config, {"m": FakeBackend()}, tracer=tracer))
    number = 33
    async with app.router.lifespan_context(app), apps.client_of(app) as client:
        await client.post(CHAT, json=question(), headers=parent(number))
    assert f"{number:032x}" in {span.trace_id for span in receiver.spans}
