"""API keys on a real Serve: two ingresses, one ledger, real HTTP."""

import asyncio
import time

import httpx

from serve_app.middleware.auth import OPEN_PATHS
from serve_app.playground.page import PAGE_PATHS
from tests.ray.twins import DEADLINE_S, MAX_REQUESTS_PER_MINUTE, MODEL, Twins
from tests.serve_app.apps import ALICE, BOB, bearer

NUM_REQUESTS = 24
REFILL_S = 60 / MAX_REQUESTS_PER_MINUTE
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


async def test_two_ingresses_admit_no_more_than_one(twins: Twins) -> None:
    async with twins.client() as client:

        async def ask(secret: str) -> httpx.Response:
            return await client.post("/v1/chat/completions", json=QUESTION, headers=bearer(secret))

        began_s = time.monotonic()
        answers = await asyncio.gather(*(ask(ALICE) for _ in range(NUM_REQUESTS)))
        num_refilled = 1 + int((time.monotonic() - began_s) / REFILL_S)
        free = await ask(BOB)
    admitted = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert 0 <= len(admitted) - MAX_REQUESTS_PER_MINUTE <= num_refilled
    assert len(admitted) + len(refused) == NUM_REQUESTS
    assert all(1 <= int(answer.headers["retry-after"]) <= REFILL_S for answer in refused)
    limits = {answer.headers["x-ratelimit-limit-requests"] for answer in answers}
    assert limits == {str(MAX_REQUESTS_PER_MINUTE)}
    assert free.status_code == 200


async def test_only_health_readiness_and_the_page_are_open_below_a_route_prefix_too(
    twins: Twins,
) -> None:
    is_open = OPEN_PATHS | PAGE_PATHS
    others = ("/docs", "/openapi.json", "/v1/models", "/nowhere", "/playground/nothing.js")
    async with httpx.AsyncClient(base_url=twins.url, timeout=DEADLINE_S) as client:
        statuses = {path: (await client.get(path)).status_code for path in (*is_open, *others)}
    assert {path for path in statuses if statuses[path] == 200} == is_open
    assert set(statuses.values()) == {200, 401}
