"""API keys on a real Serve: two ingresses, one ledger, real HTTP."""

import asyncio
from collections import deque
from collections.abc import Iterator

import httpx
import openai
import pytest
from ray import serve

from serve_app.config import AppConfig, ModelConfig
from serve_app.ingress import Ingress, listening_host
from serve_app.keys.ledger import KeyLedger
from serve_app.middleware.auth import OPEN_PATHS
from serve_app.playground.page import PAGE_PATHS
from tests.ray.test_streaming import Echo
from tests.serve_app.apps import ALICE, BOB, bearer, ring

LIMIT = 5
CHAT = "/door/v1/chat/completions"
QUESTION = {"model": "echo", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def door(base_url: str) -> Iterator[str]:
    """Serve the echo behind two ingresses with keys; return their address."""
    config = AppConfig(models=(ModelConfig(id="echo", source="echo"),))
    options = {"num_cpus": 0}
    keys = ring(requests_per_minute=LIMIT, tokens_per_minute=100_000)
    echo = serve.deployment(name="echo", ray_actor_options=options)(Echo).bind()
    ledger = serve.deployment(name="KeyLedger", ray_actor_options=options)(KeyLedger)
    ingress = serve.deployment(name="Ingress", num_replicas=2, ray_actor_options=options)(Ingress)
    bound = ingress.bind(config, {"echo": echo}, keys, ledger.bind(keys.limited))
    serve.run(bound, name="door", route_prefix="/door")
    yield base_url
    serve.delete("door")


async def test_two_ingresses_admit_no_more_than_one(door: str) -> None:
    async with httpx.AsyncClient(base_url=door, timeout=30) as client:
        asked = [client.post(CHAT, json=QUESTION, headers=bearer(ALICE)) for _ in range(24)]
        answers = await asyncio.gather(*asked)
        free = await client.post(CHAT, json=QUESTION, headers=bearer(BOB))
    admitted = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    # The limit refills by one in twelve seconds.
    assert LIMIT <= len(admitted) <= LIMIT + 2
    assert len(admitted) + len(refused) == 24
    assert all(1 <= int(answer.headers["retry-after"]) <= 12 for answer in refused)
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {str(LIMIT)}
    assert free.status_code == 200


def test_the_openai_client_raises_its_own_class_for_each_refusal(door: str) -> None:
    def ask(secret: str) -> None:
        with openai.OpenAI(base_url=f"{door}/door/v1", api_key=secret, max_retries=0) as client:
            client.chat.completions.create(
                model="echo", messages=[{"role": "user", "content": "Hello"}]
            )

    with pytest.raises(openai.AuthenticationError) as unknown:
        ask("sk-unknown-00000000")
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.RateLimitError) as limited:
        deque(map(ask, [ALICE] * (LIMIT + 3)), maxlen=0)
    assert limited.value.code == "rate_limit_exceeded"


def test_only_health_readiness_and_the_page_are_open_below_a_route_prefix_too(door: str) -> None:
    is_open = OPEN_PATHS | PAGE_PATHS
    others = ("/docs", "/openapi.json", "/v1/models", "/nowhere", "/playground/nothing.js")
    statuses = {
        path: httpx.get(f"{door}/door{path}", timeout=30).status_code
        for path in (*is_open, *others)
    }
    assert {path for path in statuses if statuses[path] == 200} == is_open
    assert set(statuses.values()) == {200, 401}


def test_a_replica_knows_where_serve_listens(base_url: str) -> None:
    class Listener:
        def host(self) -> str | None:
            return listening_host()

    bound = serve.deployment(name="Listener", ray_actor_options={"num_cpus": 0})(Listener).bind()
    handle = serve.run(bound, name="listener", route_prefix=None)
    try:
        assert handle.host.remote().result(timeout_s=30) == "127.0.0.1"
    finally:
        serve.delete("listener")
