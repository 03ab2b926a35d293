"""A fleet of servers, of which each next token depends on all tokens before it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from deployments.contract.errors import ReplicaUnavailableError
from deployments.contract.model_spec import ModelConfig, ModelSpec
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.sampling_params import InvalidParameterError, SamplingParams
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.generator.fingerprint import system_fingerprint
from deployments.vllm_engine import fleet
from deployments.vllm_engine.fleet import FleetEngine
from deployments.vllm_engine.fleet.server import LINE_BYTES

MODEL = Path(__file__).parents[3] / "models/pydoc-chat"
NUM_IDS = 400
PROMPT = (5, 6, 7)


def text_after(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Return what every server of the tests generates after a prompt."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(20 + (31 * sum(token_ids) + len(token_ids)) % NUM_IDS)
    return tuple(token_ids[len(prompt) :])


@dataclass
class FakeServer:
    """A server of vLLM that may fail.

    Attributes:
        ends_after: Tokens after which it cuts a stream off, without a finish.
        says_nothing: Whether each of its streams is one event without a token.
        event: What it sends in place of one event; None is that event.
        event_at: The number of that event, from 0.
        aborts_after: Tokens after which it ends a stream as one that drains does, with a token
            that it had not sent yet.
        status: What it answers requests with.
        version: Of vLLM.
        asked: The bodies of its requests.
        held: While it is not set, streams stand after their first token.
    """

    name: str = "m"
    max_model_len: int = 128
    ends_after: int | None = None
    says_nothing: bool = False
    event: bytes | None = None
    event_at: int = 3
    aborts_after: int | None = None
    status: int = 200
    status_of_models: int = 200
    key: str | None = None
    version: str = "0.32.0"
    asked: list[dict[str, Any]] = field(default_factory=list)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    num_left: int = 0
    url: str = ""

    async def models(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        if self.status_of_models != 200:
            return web.Response(status=self.status_of_models)
        return web.json_response({"data": [{"id": self.name, "max_model_len": self.max_model_len}]})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.status)

    async def show_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if self.status != 200:
            return web.Response(status=self.status, text="no")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.says_nothing:
            await response.write(b'data: {"choices": [{"index": 0, "token_ids": []}]}\n\n')
            return response
        num_tokens = body["sampling_params"]["max_tokens"]
        for index, token_id in enumerate(text_after(tuple(body["token_ids"]), num_tokens)):
            if index == self.ends_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            if index == self.event_at and self.event is not None:
                await response.write(b"data: %s\n\n" % self.event)
                continue
            reason = "length" if index == num_tokens - 1 else None
            if index == self.aborts_after:
                reason = "abort"
            chunk = {"index": 0, "token_ids": [token_id], "finish_reason": reason}
            if body["sampling_params"].get("logprobs") is not None:
                best = {"token_id": token_id, "logprob": -0.5, "rank": 1}
                chunk["logprobs"] = {"content": [{**best, "top_logprobs": [best]}]}
            await response.write(b"data: %s\n\n" % web.json_response({"choices": [chunk]}).body)
            if reason == "abort":
                return response
            try:
                await self.held.wait()
            except asyncio.CancelledError:
                self.num_left += 1
                raise
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def serving(*servers: FakeServer) -> AsyncIterator[FleetEngine]:
    """Run servers, and a fleet's engine that has asked them."""
    async with AsyncExitStack() as stack:
        for server in servers:
            app = web.Application()
            app.router.add_get("/v1/models", server.models)
            app.router.add_get("/health", server.health)
            app.router.add_get("/version", server.show_version)
            app.router.add_post("/inference/v1/generate", server.generate)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            server.url = "http://{}:{}".format(*runner.addresses[0][:2])
            server.held.set()
        engine = engine_of(*(each.url for each in servers))
        await asyncio.to_thread(engine.start)
        yield engine
        session = engine._session
        engine.stop()
        while session is not None and not session.closed:  # noqa: ASYNC110 - as below
            await asyncio.sleep(0)


def engine_of(*urls: str) -> FleetEngine:
    entry = {"id": "m", "source": str(MODEL), "engine": "vllm", "engine_urls": list(urls)}
    spec = ModelSpec(ModelConfig.model_validate(entry), str(MODEL), 0.0)
    return FleetEngine(spec, lambda stats: None)


async def run(
    engine: FleetEngine, given: tuple[int, ...] = (), *, is_return: bool = False, **params: Any
) -> list[TextDelta]:
    """Run one sequence to its end, and return its deltas."""
    chosen = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **params})
    request = SequenceRequest(
        engine.unique_id("s"),
        PROMPT,
        chosen,
        given,
        is_resumed=bool(given),
        is_return=is_return,
    )
    engine.validate(request)
    deltas: list[TextDelta] = []
    ended = asyncio.Event()

    def take(delta: TextDelta) -> None:
        deltas.append(delta)
        if delta.finish_reason is not None:
            ended.set()

    with engine.running(request, take):
        await asyncio.wait_for(ended.wait(), 10)
    return deltas


def token_ids_of(deltas: list[TextDelta]) -> tuple[int, ...]:
    return tuple(token_id for delta in deltas for token_id in delta.token_ids)


async def test_a_sequence_runs_on_a_server() -> None:
    server = FakeServer()
    async with serving(server) as engine:
        deltas = await run(engine, temperature=0.5, seed=7, top_logprobs=1)
    assert token_ids_of(deltas) == text_after(PROMPT, 12)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[0].logprobs[0].chosen.logprob == -0.5
    (body,) = server.asked
    assert body["model"] == "m"
    assert body["sampling_params"]["seed"] == 7


@pytest.mark.parametrize("cut", [0, 1, 7, 11])
async def test_a_lost_server_s_sequence_goes_on_at_another(cut: int) -> None:
    lost, left = FakeServer(ends_after=cut), FakeServer()
    async with serving(lost, left) as engine:
        deltas = await run(engine)
    assert token_ids_of(deltas) == text_after(PROMPT, 12)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert (len(lost.asked), len(left.asked)) == (1, 1)
    # What came together with the connection's end may be unread, and is generated again.
    num_read = len(left.asked[0]["token_ids"]) - len(PROMPT)
    assert num_read <= cut
    assert left.asked[0]["token_ids"] == [*PROMPT, *text_after(PROMPT, num_read)]
    assert left.asked[0]["sampling_params"]["max_tokens"] == 12 - num_read


async def test_a_server_that_drains_neither_loses_nor_repeats_text() -> None:
    whole = FakeServer()
    async with serving(whole) as engine:
        expected = await run(engine, stop=("no such text, but long",))
    async with serving(FakeServer(aborts_after=5), whole) as engine:
        deltas = await run(engine, stop=("no such text, but long",))
    assert token_ids_of(deltas) == token_ids_of(expected) == text_after(PROMPT, 12)
    assert "".join(each.text for each in deltas) == "".join(each.text for each in expected)


async def test_servers_that_restart_in_turn_keep_a_sequence() -> None:
    one, two = FakeServer(aborts_after=2), FakeServer(aborts_after=2)
    async with serving(one, two) as engine:
        assert token_ids_of(await run(engine)) == text_after(PROMPT, 12)
    assert min(len(one.asked), len(two.asked)) > 1


async def test_a_sequence_that_comes_from_another_replica_goes_on() -> None:
    whole = text_after(PROMPT, 12)
    async with serving(FakeServer()) as engine:
        deltas = await run(engine, given=whole[:5])
    assert token_ids_of(deltas) == whole[5:]
    assert engine.stats.num_resumed == 1


async def test_a_sequence_that_returns_is_counted_once() -> None:
    whole = text_after(PROMPT, 12)
    async with serving(FakeServer()) as engine:
        for is_return, num in ((False, 5), (True, 8)):
            deltas = await run(engine, given=whole[:num], is_return=is_return)
            assert token_ids_of(deltas) == whole[num:]
    assert engine.stats.num_resumed == 1
    assert engine.stats.num_prompt_tokens == len(PROMPT)


async def test_it_is_left_to_other_replicas_when_no_server_is_left() -> None:
    async with serving(FakeServer(ends_after=3), FakeServer(status=503)) as engine:
        deltas = await run(engine)
    found = token_ids_of(deltas)
    assert found == text_after(PROMPT, len(found))
    assert deltas[-1].finish_reason is FinishReason.ABORT


async def test_servers_whose_streams_hold_no_token_are_left() -> None:
    servers = [FakeServer(says_nothing=True), FakeServer(says_nothing=True)]
    async with serving(*servers) as engine:
        (last,) = [each for each in await run(engine) if each.finish_reason is not None]
    assert last.finish_reason is FinishReason.ABORT
    assert [len(each.asked) for each in servers] == [1, 1]


MALFORMED = {
    "no JSON": b'{"choices": [}',
    "nested too deeply": b'{"choices": ' + b"[" * 100_000,
    "too long": b"{" + b" " * 2 * LINE_BYTES + b"}",
    "no list": b'{"choices": 5}',
    "no choice": b'{"choices": [5]}',
    "no token ids": b'{"choices": [{"token_ids": 5}]}',
    "a word": b'{"choices": [{"token_ids": ["word"]}]}',
    "a negative id": b'{"choices": [{"token_ids": [-1]}]}',
    "an id beyond int32": b'{"choices": [{"token_ids": [4294967296]}]}',
    "no reason": b'{"choices": [{"token_ids": [5], "finish_reason": [5]}]}',
    "empty log-probabilities": b'{"choices": [{"token_ids": [5], "logprobs": {"content": [{}]}}]}',
    "log-probabilities of another token": (
        b'{"choices": [{"token_ids": [5], "logprobs": {"content": '
        b'[{"token_id": 6, "logprob": -1.0, "top_logprobs": []}]}}]}'
    ),
    "log-probabilities of fewer tokens": (
        b'{"choices": [{"token_ids": [5, 6], "logprobs": {"content": '
        b'[{"token_id": 5, "logprob": -1.0, "top_logprobs": []}]}}]}'
    ),
    "a log-probability that is no number": (
        b'{"choices": [{"token_ids": [5], "logprobs": {"content": '
        b'[{"token_id": 5, "logprob": "low", "top_logprobs": []}]}}]}'
    ),
}


@pytest.mark.parametrize("event", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_sequence_whose_server_sends_a_malformed_event_goes_on_at_another(
    event: bytes,
) -> None:
    broken, left = FakeServer(event=event), FakeServer()
    async with serving(broken, left) as engine:
        deltas = await run(engine, top_logprobs=1)
    assert token_ids_of(deltas) == text_after(PROMPT, 12)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert [len(each.asked) for each in (broken, left)] == [1, 1]
    assert left.asked[0]["token_ids"] == [*PROMPT, *text_after(PROMPT, 3)]


async def test_a_sequence_is_at_each_server_of_malformed_events_once() -> None:
    servers = [FakeServer(event=b'{"choices": [5]}', event_at=0) for _ in range(2)]
    async with serving(*servers) as engine:
        (last,) = await run(engine)
    assert last.finish_reason is FinishReason.ABORT
    assert [len(each.asked) for each in servers] == [1, 1]


async def test_what_a_server_refuses_fails_without_a_move() -> None:
    server, other = FakeServer(status=400), FakeServer()
    async with serving(server, other) as engine:
        deltas = await run(engine)
    assert deltas[-1].finish_reason is FinishReason.ERROR
    assert deltas[-1].error is not None
    assert "refuses the request (status 400)" in deltas[-1].error
    assert other.asked == []


async def test_sequences_go_to_the_server_that_runs_fewest() -> None:
    one, two = FakeServer(), FakeServer()
    async with serving(one, two) as engine:
        for each in (one, two):
            each.held.clear()
        running = [asyncio.ensure_future(run(engine)) for _ in range(4)]
        while engine.stats.num_running < 4:  # noqa: ASYNC110 - a server's count, not an event
            await asyncio.sleep(0.01)
        for each in (one, two):
            each.held.set()
        await asyncio.gather(*running)
    assert (len(one.asked), len(two.asked)) == (2, 2)


async def test_leaving_ends_the_sequence_at_its_server() -> None:
    server = FakeServer()
    async with serving(server) as engine:
        server.held.clear()
        running = asyncio.ensure_future(run(engine))
        while not server.asked:  # noqa: ASYNC110 - as below
            await asyncio.sleep(0.01)
        running.cancel()
        while not server.num_left:  # noqa: ASYNC110 - as below
            await asyncio.sleep(0.01)
    assert engine.stats.num_running == 0


async def test_a_server_that_fails_its_check_rests() -> None:
    sick, well = FakeServer(status=500), FakeServer()
    async with serving(sick, well) as engine:
        await engine.check_health()
        await run(engine)
        assert sick.asked == []
        well.status = 500
        with pytest.raises(ReplicaUnavailableError):
            await engine.check_health()


async def test_the_servers_key_is_the_one_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(fleet.API_KEY, "secret")
    async with serving(FakeServer(key="secret")) as engine:
        assert token_ids_of(await run(engine)) == text_after(PROMPT, 12)
    monkeypatch.delenv(fleet.API_KEY)
    with pytest.raises(UnsupportedModelError, match=r"status 401; .*VLLM_API_KEY"):
        async with serving(FakeServer(key="secret")):
            pass


async def test_servers_with_two_models_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="different models: a, b"):
        async with serving(FakeServer("a"), FakeServer("b")):
            pass


async def test_servers_of_two_versions_have_two_fingerprints() -> None:
    found = {}
    for version in ("0.31.0", "0.32.0"):
        async with serving(FakeServer(version=version), FakeServer(version=version)) as engine:
            found[version] = system_fingerprint("files", engine._facts.versions)
    assert len(set(found.values())) == 2
    # The third one does not draw as most do, and gets nothing.
    async with serving(*map(versioned, ("0.32.0", "0.32.0", "0.31.0"))) as engine:
        assert system_fingerprint("files", engine._facts.versions) == found["0.32.0"]


async def test_a_sequence_goes_on_only_at_a_server_of_its_version() -> None:
    lost, other, same = FakeServer(ends_after=4), versioned("0.31.0"), FakeServer()
    async with serving(lost, other, same) as engine:
        assert token_ids_of(await run(engine)) == text_after(PROMPT, 12)
    assert (len(lost.asked), len(other.asked), len(same.asked)) == (1, 0, 1)
    lost = FakeServer(ends_after=4)
    async with serving(lost, versioned("0.31.0")) as engine:
        deltas = await run(engine)
    assert deltas[-1].finish_reason is FinishReason.ABORT


async def test_a_server_with_a_new_version_waits_for_the_next_replica() -> None:
    one, two = FakeServer(), FakeServer()
    async with serving(one, two) as engine:
        one.version = "0.33.0"
        await engine.check_health()
        for _ in range(2):
            await run(engine)
        assert (len(one.asked), len(two.asked)) == (0, 2)
        two.version = "0.33.0"
        with pytest.raises(ReplicaUnavailableError):
            await engine.check_health()


@pytest.mark.parametrize("change", [{"name": "other"}, {"max_model_len": 64}], ids=str)
async def test_a_server_that_comes_back_as_another_gets_nothing(change: dict[str, Any]) -> None:
    one, two = FakeServer(), FakeServer()
    async with serving(one, two) as engine:
        for name, value in change.items():
            setattr(one, name, value)
        await engine.check_health()
        for _ in range(2):
            await run(engine)
    assert (len(one.asked), len(two.asked)) == (0, 2)


async def test_a_server_that_was_down_at_the_start_gets_sequences_if_it_is_the_same() -> None:
    down, up = FakeServer(status_of_models=502), FakeServer()
    async with serving(down, up) as engine:
        down.status_of_models = 200
        await engine.check_health()
        up.status = 500
        await run(engine)
    assert len(down.asked) == 1


def versioned(version: str) -> FakeServer:
    return FakeServer(version=version)


async def test_a_gateway_s_error_leaves_the_other_servers() -> None:
    async with serving(FakeServer(status_of_models=502), FakeServer()) as engine:
        assert token_ids_of(await run(engine)) == text_after(PROMPT, 12)


def test_no_server_is_an_error_that_the_next_start_may_not_meet() -> None:
    with pytest.raises(ConnectionError, match=r"no server of vLLM answers at http://127.0.0.1:9"):
        engine_of("http://127.0.0.1:9").start()


@pytest.mark.parametrize(
    ("params", "named"),
    [({"prompt_logprobs": 1}, "prompt_logprobs"), ({"grammar": "{}"}, "response_format")],
)
async def test_what_servers_can_t_stream_is_refused_by_name(
    params: dict[str, Any], named: str
) -> None:
    async with serving(FakeServer()) as engine:
        with pytest.raises(InvalidParameterError) as refused:
            await run(engine, **params)
    assert refused.value.param == named


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"engine_urls": ["10.0.0.7:8000"]}, "string should match"),
        ({"engine_urls": ["http://a:1"], "num_gpus": 1}, "have their own num_gpus"),
        ({"engine_urls": ["http://a:1", "http://a:1"]}, "a server is named twice"),
        ({"engine_urls": ["http://a:1"], "engine": "raystream"}, "write `engine: vllm` too"),
    ],
)
def test_an_entry_that_makes_no_sense_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=f"(?i){message}"):
        ModelConfig.model_validate({"id": "m", "source": "x", "engine": "vllm", **keys})
