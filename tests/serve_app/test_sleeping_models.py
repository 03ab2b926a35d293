"""A model without a replica: questions leave it asleep, and requests wake it and wait."""

import asyncio
import gc
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from deployments.contract.descriptions import ModelDescription
from deployments.contract.errors import (
    ContextLengthExceededError,
    OverloadedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.generation import GenerationRequest, TokenizedPrompt, TokenizeRequest
from serve_app.backends.models import cold_start, serving_states
from serve_app.backends.models.serving_states import DeploymentState, ServingState
from serve_app.backends.replicas.running_replicas import ReplicaFacts, RunningReplicas
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from serve_app.keys.api_keys import KeyRing
from serve_app.metrics import REJECTIONS, IngressMetrics
from tests.serve_app.apps import ALICE, BOB, CHAT, AppClient, access_lines, bearer, question, ring
from tests.serve_app.fakes import FakeBackend, FakeClock, FakeStream
from tests.serve_app.ingress_numbers import numbers
from tests.stopped_clock import settle

MAX_NUM_HELD = 2
"""One that may run, and one that may wait."""


class Sleeper(FakeBackend):
    """A model whose first request wakes it; `loads` ends when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.replicas = RunningReplicas()
        self.state = ServingState.ASLEEP
        self.message = ""
        self.loads = asyncio.Event()
        self.failure: RaystreamError | None = None
        self.fails_when_left = False
        self.num_waiting = 0
        self.num_asked = 0
        self.num_file_reads = 0
        self.has_no_files = False

    async def generate(self, request: GenerationRequest) -> FakeStream:
        self.num_waiting += 1
        self.num_asked += 1
        try:
            await self.loads.wait()
        except asyncio.CancelledError:
            if self.fails_when_left:
                raise ContextLengthExceededError("too long", "messages") from None
            raise
        finally:
            self.num_waiting -= 1
        self.run()
        if self.failure is not None:
            raise self.failure
        return await super().generate(request)

    def run(self) -> None:
        self.state = ServingState.RUNNING
        self.replicas.replace([ReplicaFacts("r", None)])

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        await self.loads.wait()
        self.run()
        return await super().tokenize(request)

    async def states(self) -> dict[str, DeploymentState]:
        return {"m": DeploymentState(self.state, message=self.message)}

    async def describe_files(self, model_id: str) -> ModelDescription:
        assert model_id == "m"
        self.num_file_reads += 1
        if self.has_no_files:
            raise ReplicaUnavailableError("no such folder")
        return self.description


class Caller(AppClient):
    """A client of an application that serves a sleeper as model `m`."""

    def __init__(self, app: FastAPI, sleeper: Sleeper) -> None:
        super().__init__(app)
        self.sleeper = sleeper

    async def wake(self, body: dict[str, object], path: str = CHAT) -> httpx.Response:
        """Ask, and load the model once the request waits for it."""
        asking = asyncio.ensure_future(self.post(path, json=body))
        await waiting(self.sleeper, 1)
        self.sleeper.loads.set()
        return await asking


def app_of(
    sleeper: Sleeper, clock: FakeClock, metrics: IngressMetrics, keys: KeyRing | None = None
) -> FastAPI:
    """Return an application that serves a sleeper as model `m`."""
    models = [{"id": "m", "source": "nowhere", "max_num_seqs": 1, "max_queued_requests": 1}]
    parts = AppParts(
        AppConfig.model_validate({"models": models}),
        {"m": sleeper},
        clock=clock,
        replicas={"m": sleeper.replicas},
        describe_files=sleeper.describe_files,
        ask_states=sleeper.states,
        metrics=metrics,
        keys=keys,
    )
    return build_app(parts)


@pytest.fixture
async def client(clock: FakeClock, metrics: IngressMetrics) -> AsyncIterator[Caller]:
    sleeper = Sleeper()
    async with Caller(app_of(sleeper, clock, metrics), sleeper) as client:
        yield client


@pytest.fixture
def metrics() -> IngressMetrics:
    return IngressMetrics(["m"])


async def waiting(sleeper: Sleeper, number: int) -> None:
    async with asyncio.timeout(30):
        while sleeper.num_waiting != number:  # noqa: ASYNC110 - other tasks' state
            await asyncio.sleep(0.001)


async def test_questions_leave_a_model_asleep(client: Caller) -> None:
    for path in ("/live", "/ready", "/health", "/v1/models", "/v1/models/m", "/version"):
        for _ in range(2):
            assert (await client.get(path)).status_code == 200, path
    (listed,) = (await client.get("/v1/models")).json()["data"]
    assert (listed["state"], listed["max_model_len"]) == ("asleep", 128)
    assert client.sleeper.num_calls == client.sleeper.num_pings == client.sleeper.num_describes == 0
    assert client.sleeper.num_file_reads == 1


@pytest.mark.parametrize(
    ("path", "fails"), [("/v1/models/m", False), ("/health", False), ("/health", True)]
)
@pytest.mark.usefixtures("advance")  # the clock stands: no look at the controller from time to time
async def test_a_model_whose_last_process_ends_while_it_is_asked_is_told_as_asleep(
    client: Caller, path: str, fails: bool
) -> None:
    sleeper = client.sleeper
    sleeper.run()
    assert (await client.get(path)).status_code == 200  # the controller's word is remembered
    sleeper.loaded = sleeper.pinged = asyncio.Event()
    asking = asyncio.ensure_future(client.get(path))
    await settle()
    assert sleeper.num_describes + sleeper.num_pings == 2
    sleeper.state = ServingState.ASLEEP
    sleeper.replicas.replace([])
    if fails:
        sleeper.sickness = ReplicaUnavailableError("its process has ended")
        sleeper.pinged.set()
    await settle()
    assert asking.done()
    answer = await asking
    assert answer.status_code == 200
    assert path == "/health" or answer.json()["state"] == "asleep"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, question(stream=True)),
        ("/v1/completions", {"model": "m", "prompt": "hi", "stream": True}),
        ("/text-generation", {"prompt": "hi"}),
    ],
)
async def test_a_stream_tells_that_its_model_is_loaded_and_then_is_as_ever(
    client: Caller, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object]
) -> None:
    monkeypatch.setattr(cold_start, "loading", lambda id_, waited_s: f"loading {id_}")
    cold = await client.wake(body, path)
    warm = await client.post(path, json=body)
    assert (cold.status_code, warm.status_code) == (200, 200)
    assert cold.headers["content-type"] == warm.headers["content-type"]
    comment, rest = cold.text.split("\n", 1)
    assert comment == ": loading m"
    answers = [
        [
            line
            for line in text.split("\n\n")
            if "[DONE]" in line or '"finish_reason":"stop"' in line
        ]
        for text in (rest, warm.text)
    ]
    assert len(answers[0]) == len(answers[1])
    assert rest.count("data:") == warm.text.count("data:")


@pytest.mark.parametrize(
    ("state", "status_code"),
    [(ServingState.SCALING, 200), (ServingState.DOWN, 503), (ServingState.FAILED, 503)],
)
async def test_probes_of_a_model_without_a_replica_ask_none(
    client: Caller, state: ServingState, status_code: int
) -> None:
    client.sleeper.state = state
    assert (await client.get("/ready")).status_code == status_code
    assert (await client.get("/health")).status_code == status_code
    assert client.sleeper.num_calls == client.sleeper.num_pings == 0


@pytest.mark.usefixtures("advance")
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_requests_to_a_model_that_has_failed_are_refused_with_the_reason(
    client: Caller, is_streamed: bool
) -> None:
    client.sleeper.state = ServingState.FAILED
    client.sleeper.message = "SomeError: can't load 'x': there is no such folder"
    told = "The model 'm' has failed, and no replica of it runs: can't load 'x': there is no such"
    answer = await client.post(CHAT, json=question(stream=is_streamed))
    if is_streamed:  # the stream of a model without a replica begins at once
        assert told in answer.text
        assert '"code":"replica_unavailable"' in answer.text
        assert "[DONE]" not in answer.text
    else:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["message"].startswith(told)
    card = await client.get("/v1/models/m")
    assert (card.status_code, card.json()["error"]["message"].startswith(told)) == (503, True)
    assert (await client.get("/health")).json()["error"]["message"].startswith(f"m: {told}")
    (listed,) = (await client.get("/v1/models")).json()["data"]
    assert (listed["state"], listed["max_model_len"]) == ("failed", None)
    assert listed["failure"].startswith("can't load 'x': there is no such folder")
    assert client.sleeper.num_asked == client.sleeper.num_describes == 0


async def test_a_request_that_waits_is_refused_once_no_replica_will_run(
    client: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_start, "POLL_INTERVAL_S", 0.01)  # well before the call is made again
    monkeypatch.setattr(serving_states, "MEMORY_S", 0.0)
    asking = asyncio.ensure_future(client.post(CHAT, json=question()))
    await waiting(client.sleeper, 1)
    client.sleeper.state = ServingState.FAILED
    answer = await asking
    assert (answer.status_code, client.sleeper.num_waiting) == (503, 0)


async def test_the_error_of_an_attempt_that_is_given_up_is_not_logged_as_lost(
    client: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_start, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(serving_states, "MEMORY_S", 0.0)
    lost = list[dict[str, object]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    client.sleeper.fails_when_left = True
    asking = asyncio.ensure_future(client.post(CHAT, json=question()))
    await waiting(client.sleeper, 1)
    client.sleeper.state = ServingState.FAILED
    assert (await asking).status_code == 503
    gc.collect()  # which is when asyncio tells of errors that were never read
    assert lost == []


async def test_a_model_whose_files_can_not_be_read_is_described_by_its_replica(
    client: Caller,
) -> None:
    client.sleeper.has_no_files = True
    client.sleeper.loads.set()
    assert (await client.post(CHAT, json=question())).status_code == 200
    assert (client.sleeper.num_file_reads, client.sleeper.num_describes) == (1, 1)


async def test_a_whole_answer_waits(client: Caller) -> None:
    answer = await client.wake(question())
    assert (answer.status_code, answer.json()["object"]) == (200, "chat.completion")


async def test_requests_beyond_those_that_may_wait_are_refused_at_once(
    client: Caller, metrics: IngressMetrics
) -> None:
    held = [
        asyncio.ensure_future(client.post(CHAT, json=question(stream=stream)))
        for stream in (True, False)
    ]
    await waiting(client.sleeper, MAX_NUM_HELD)
    refused = await client.post(CHAT, json=question(stream=True))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "is being loaded, and 2 sequences wait" in refused.json()["error"]["message"]
    assert numbers(metrics, REJECTIONS) == {("m", "loading"): 1}
    client.sleeper.loads.set()
    assert [answer.status_code for answer in await asyncio.gather(*held)] == [200, 200]
    assert (await client.post(CHAT, json=question(stream=True))).status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_200_clients_of_a_key_leave_another_key_its_place_while_the_model_loads(
    clock: FakeClock, metrics: IngressMetrics, is_streamed: bool
) -> None:
    sleeper = Sleeper()

    async def ask(secret: str) -> httpx.Response:
        return await caller.post(CHAT, json=question(stream=is_streamed), headers=bearer(secret))

    async with Caller(app_of(sleeper, clock, metrics, ring()), sleeper) as caller:
        crowd = [asyncio.ensure_future(ask(ALICE)) for _ in range(200)]
        await waiting(sleeper, MAX_NUM_HELD)
        other = asyncio.ensure_future(ask(BOB))
        await asyncio.wait(crowd, return_when=asyncio.FIRST_COMPLETED)
        async with asyncio.timeout(30):
            while numbers(metrics, REJECTIONS) != {("m", "loading"): 199}:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await waiting(sleeper, MAX_NUM_HELD)
        sleeper.loads.set()
        answers = await asyncio.gather(*crowd)
        assert "Hello" in (await other).text
    # A stream that has waited has begun, so its refusal is an event.
    refused = [each for each in answers if "is being loaded, and 2 sequences wait" in each.text]
    assert len(refused) == 199
    assert sum(each.status_code == 503 for each in refused) == (198 if is_streamed else 199)


async def test_a_client_that_leaves_just_as_its_stream_is_accepted_leaves_no_stream_open(
    client: Caller,
) -> None:
    asking = asyncio.ensure_future(client.post(CHAT, json=question()))
    await waiting(client.sleeper, 1)
    client.sleeper.loads.set()
    async with asyncio.timeout(30):
        while not client.sleeper.streams:  # noqa: ASYNC110 - the call has its answer now
            await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    (stream,) = client.sleeper.streams
    assert stream.closed.is_set()


async def test_several_answers_take_several_places(client: Caller) -> None:
    asking = asyncio.ensure_future(client.post(CHAT, json=question(n=2)))
    await waiting(client.sleeper, 1)
    assert (await client.post(CHAT, json=question())).status_code == 503
    client.sleeper.loads.set()
    assert len((await asking).json()["choices"]) == 2


async def test_a_request_that_has_waited_is_not_refused_by_a_full_replica(
    client: Caller, metrics: IngressMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_start, "MAX_BACKOFF_S", 0.001)
    client.sleeper.scripts = [OverloadedError("full", None, 1), OverloadedError("full", None, 1)]
    assert (await client.wake(question())).status_code == 200
    assert numbers(metrics, REJECTIONS) == {}


async def test_a_request_larger_than_all_places_is_left_to_the_replica(client: Caller) -> None:
    client.sleeper.loads.set()
    answer = await client.post(CHAT, json=question(n=2 * MAX_NUM_HELD))
    assert (answer.status_code, len(answer.json()["choices"])) == (200, 2 * MAX_NUM_HELD)


async def test_a_request_asks_anew_until_serve_says_that_it_has_given_up(
    client: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_start, "POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(cold_start, "PATIENCE_S", 0.01)
    asking = asyncio.ensure_future(client.post(CHAT, json=question()))
    await waiting(client.sleeper, 1)
    async with asyncio.timeout(30):
        while client.sleeper.num_asked < 3:  # noqa: ASYNC110 - other tasks' state
            await asyncio.sleep(0.001)
    client.sleeper.loads.set()
    assert (await asking).status_code == 200
    assert client.sleeper.num_waiting == 0


async def test_a_failure_after_the_wait_is_the_last_event(
    client: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    client.sleeper.failure = ContextLengthExceededError("too long", "messages")
    answer = await client.wake(question(stream=True))
    assert answer.status_code == 200
    assert '"code":"context_length_exceeded"' in answer.text
    assert "[DONE]" not in answer.text
    (line,) = access_lines(caplog)
    assert (line["finish_reason"], line["error_code"]) == ("error", "context_length_exceeded")


async def test_a_mistake_in_the_request_is_a_status_and_wakes_no_model(client: Caller) -> None:
    answer = await client.post(CHAT, json=question(stream=True, n=1000))
    assert answer.status_code == 400
    assert client.sleeper.num_calls == 0


async def test_a_client_that_leaves_gives_its_place_up(client: Caller) -> None:
    for stream in (True, False):
        for _ in range(MAX_NUM_HELD + 1):
            asking = asyncio.ensure_future(client.post(CHAT, json=question(stream=stream)))
            await waiting(client.sleeper, 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await waiting(client.sleeper, 0)


async def test_a_request_waits_for_a_model_whose_description_is_not_known_yet(
    client: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_start, "POLL_INTERVAL_S", 0.001)
    client.sleeper.state = ServingState.DOWN
    asking = asyncio.ensure_future(client.post(CHAT, json=question(stream=True)))
    async with asyncio.timeout(30):
        while (await client.get("/ready")).status_code != 503:
            pass
    client.sleeper.loads.set()
    client.sleeper.run()
    answer = await asking
    assert (answer.status_code, client.sleeper.num_file_reads) == (200, 0)
    assert answer.text.startswith(": loading m (0 s)\n")
