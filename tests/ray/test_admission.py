"""Two hundred clients at once ask a model with 8 slots and a queue of 16."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.channel.outbox import OutgoingStream
from deployments.channel.server import ChannelServer
from deployments.contract import StreamKey, TextDelta
from deployments.model_replica import node_address
from deployments.model_spec import ModelSpec
from deployments.text_generator import TextGenerator
from serve_app.config import AppConfig, ModelConfig
from serve_app.ingress import Ingress
from tests.deployments.tiny_folder import spec
from tests.prometheus import samples

NUM_CLIENTS, MAX_NUM_SEQS, NUM_WAITING, NUM_TOKENS = 200, 8, 16, 20
DEADLINE_S = 120

Handle = DeploymentHandle[Any]


class HeldChannels(ChannelServer):
    """Holds all deltas until it is told to release them."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self._is_held = True
        self._held: list[Callable[[], None]] = []

    def hold(self) -> None:
        self._is_held = True

    def let_go(self) -> None:
        self._is_held = False
        held, self._held = self._held, []
        for put in held:
            put()
        self.flush()

    @contextmanager
    def stream(self, key: StreamKey) -> Iterator[OutgoingStream]:
        with super().stream(key) as stream:
            put = stream.put

            def put_or_hold(delta: TextDelta) -> None:
                if self._is_held:
                    self._held.append(partial(put, delta))
                else:
                    put(delta)

            stream.put = put_or_hold  # type: ignore[method-assign] # only of this stream
            yield stream


class HeldGenerator(TextGenerator):
    """Accepts requests, and holds their answers until it is told to release them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._channels: HeldChannels = HeldChannels(node_address())

    async def hold(self) -> None:
        self._channels.hold()

    async def let_go(self) -> None:
        self._channels.let_go()


def serve_held(
    folder: Path,
    name: str,
    *,
    num_ingresses: int,
    num_models: int,
    max_num_seqs: int,
    num_waiting: int,
) -> Handle:
    """Serve a model that holds its answers under /`name`; return its handle."""
    options = {"num_cpus": 0.4}
    model = serve.deployment(
        name="held", ray_actor_options=options, max_ongoing_requests=512, num_replicas=num_models
    )(HeldGenerator).bind(
        spec(
            folder,
            id="held",
            max_num_seqs=max_num_seqs,
            max_queued_requests=num_waiting,
            max_model_len=4096,
        )
    )
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=num_ingresses,
        ray_actor_options=options,
        max_ongoing_requests=1000,
    )(Ingress)
    config = AppConfig(models=(ModelConfig(id="held", source="held"),))
    serve.run(ingress.bind(config, {"held": model}), name=name, route_prefix=f"/{name}")
    return serve.get_deployment_handle("held", name)


@pytest.fixture(scope="module", params=[1, 2], ids=["one ingress", "two ingresses"])
def held(request: pytest.FixtureRequest, base_url: str, tiny_folder: Path) -> Iterator[Handle]:
    """Serve one replica of a model behind one ingress replica or two."""
    yield serve_held(
        tiny_folder,
        "admission",
        num_ingresses=request.param,
        num_models=1,
        max_num_seqs=MAX_NUM_SEQS,
        num_waiting=NUM_WAITING,
    )
    serve.delete("admission")


@pytest.fixture
async def client(base_url: str, held: Handle) -> Any:
    await held.hold.remote()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=f"{base_url}/admission", timeout=DEADLINE_S, limits=limits
    ) as client:
        yield client
    await held.let_go.remote()


def body(**fields: object) -> dict[str, object]:
    return {"prompt": "hi", "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}


async def wait_for(num_done: int, tasks: list[asyncio.Task[httpx.Response]]) -> None:
    """Wait until exactly this many requests are answered."""
    while sum(task.done() for task in tasks) < num_done:
        await asyncio.wait([t for t in tasks if not t.done()], return_when=asyncio.FIRST_COMPLETED)


def is_refusal(answer: httpx.Response) -> bool:
    if answer.status_code != 503:
        return False
    assert answer.json()["error"]["code"] == "overloaded"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    return True


async def test_exactly_the_requests_beyond_the_limits_are_refused(
    client: httpx.AsyncClient, held: Handle
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        asked = [
            asyncio.create_task(client.post("/text-generation", json=body(stream=i % 2 == 0)))
            for i in range(NUM_CLIENTS)
        ]
        await wait_for(NUM_CLIENTS - MAX_NUM_SEQS - NUM_WAITING, asked)
        await held.let_go.remote()
        answers = await asyncio.gather(*asked)
    admitted = [answer for answer in answers if not is_refusal(answer)]
    assert len(admitted) == MAX_NUM_SEQS + NUM_WAITING
    for answer in admitted:
        assert answer.status_code == 200
        if answer.headers["content-type"] == "text/event-stream":
            assert answer.text.endswith("data: [DONE]\n\n")
            assert f'"total_token_count":{NUM_TOKENS}' in answer.text.split("\n\n")[-3]
        else:
            assert answer.json()["token_count"] == NUM_TOKENS


async def test_a_request_for_several_answers_is_admitted_whole_or_not_at_all(
    client: httpx.AsyncClient, held: Handle
) -> None:
    several = body(n=5, messages=[{"role": "user", "content": "hi"}], model="held")
    del several["prompt"]
    async with asyncio.timeout(DEADLINE_S):
        asked = [
            asyncio.create_task(client.post("/v1/chat/completions", json=several))
            for _ in range(12)
        ]
        # Four groups of five fit into 24 places; a fifth group does not.
        await wait_for(8, asked)
        await held.let_go.remote()
        answers = await asyncio.gather(*asked)
    admitted = [answer for answer in answers if not is_refusal(answer)]
    assert [len(answer.json()["choices"]) for answer in admitted] == [5] * 4


async def test_a_client_that_leaves_makes_room_for_another(
    client: httpx.AsyncClient, held: Handle
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        asked = [
            asyncio.create_task(client.post("/text-generation", json=body(stream=False)))
            for _ in range(MAX_NUM_SEQS + NUM_WAITING + 1)
        ]
        await wait_for(1, asked)
        assert is_refusal(next(task.result() for task in asked if task.done()))
        next(task for task in asked if not task.done()).cancel()
        while True:
            # A stream's headers come when it is accepted, even while its text is held.
            async with client.stream("POST", "/text-generation", json=body()) as late:
                if late.status_code == 503:
                    continue
                await held.let_go.remote()
                assert (await late.aread()).endswith(b"data: [DONE]\n\n")
                break
        await asyncio.gather(*asked, return_exceptions=True)


@pytest.fixture
def twins(base_url: str, tiny_folder: Path) -> Iterator[Handle]:
    """Serve two replicas of a model with room for four each, behind two ingress replicas."""
    yield serve_held(
        tiny_folder, "twins", num_ingresses=2, num_models=2, max_num_seqs=2, num_waiting=2
    )
    serve.delete("twins")


async def num_refusals(client: httpx.AsyncClient, application: str, at_least: int) -> float:
    """Wait until Prometheus reports this many refusals of an application's model; return them."""
    port = ray.nodes()[0]["MetricsExportPort"]  # type: ignore[no-untyped-call] # Ray leaves it untyped
    while True:
        told = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        counts = [
            float(line.rpartition(" ")[2])
            for line in told.splitlines()
            if line.startswith("ray_vllm_admission_rejections_total{")
            and f'application="{application}"' in line
            and 'model_name="held"' in line
        ]
        if sum(counts) >= at_least:
            return sum(counts)
        await asyncio.sleep(0.5)  # each replica reports its counts every ten seconds


async def test_a_request_that_a_full_replica_refuses_is_taken_by_another(
    base_url: str, twins: Handle
) -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        AsyncExitStack() as stack,
        httpx.AsyncClient(base_url=f"{base_url}/twins", timeout=DEADLINE_S) as client,
    ):
        statuses = []
        for _ in range(12):
            asked = client.stream("POST", "/text-generation", json=body())
            statuses.append((await stack.enter_async_context(asked)).status_code)
        assert (statuses.count(200), statuses.count(503)) == (8, 4)
        # Each replica has refused some requests, among them some that the other one then took.
        assert await num_refusals(client, "twins", at_least=4) == 4
        # Whichever ingress is scraped, it shows both ingresses and both replicas.
        for _ in range(4):
            found = samples((await client.get("/metrics")).text)
            refusals = [each for each in found if each.name == "vllm:admission_rejections_total"]
            assert len({each.labels["replica"] for each in refusals}) == 2
            assert sum(each.value for each in refusals) == 4
            prompts = [each for each in found if each.name == "vllm:prompt_tokens_total"]
            assert len({each.labels["replica"] for each in prompts}) == 2
            assert all(each.value > 0 for each in prompts)
        await asyncio.to_thread(twins.broadcast("let_go").results)
