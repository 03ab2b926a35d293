"""`openai` for Python and API keys, without Ray: `tests/ray/test_access` runs the whole server.

An unknown key fails once; a key that has used up a limit retries when Retry-After says.
"""

import time
from collections.abc import AsyncIterator

import httpx2
import openai
import pytest
from fastapi import FastAPI

from serve_app.keys.ledger import KeyLedger
from tests.clients.questions import about
from tests.serve_app.apps import ALICE, make_app, ring
from tests.serve_app.fakes import FakeBackend
from tests.serve_app.keys.test_ledger import HandClock

LIMIT = 60
"""Requests per minute, so that the next one is allowed after a second."""
RETRY_AFTER_S = 1


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def door(clock: HandClock) -> FastAPI:
    keys = ring(requests_per_minute=LIMIT)
    return make_app(FakeBackend(), keys, KeyLedger(keys.limited, clock))


@pytest.fixture
def answers() -> list[httpx2.Response]:
    """Return a list for the answers that the client receives."""
    return []


@pytest.fixture
async def eager(
    door: FastAPI, clock: HandClock, answers: list[httpx2.Response]
) -> AsyncIterator[openai.AsyncOpenAI]:
    """Yield Alice's client, which retries, while the server's clock stands still."""

    async def note(answer: httpx2.Response) -> None:
        answers.append(answer)
        if answer.status_code == 429:
            clock.stopwatch_s += RETRY_AFTER_S

    transport = httpx2.ASGITransport(door)
    http = httpx2.AsyncClient(transport=transport, event_hooks={"response": [note]})
    async with openai.AsyncOpenAI(
        base_url="http://door/v1", api_key=ALICE, max_retries=1, http_client=http
    ) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_key_raises_and_is_not_retried(
    eager: openai.AsyncOpenAI, answers: list[httpx2.Response], stream: bool
) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        await eager.with_options(api_key="sk-unknown-00000000").chat.completions.create(
            **about("x", model="m"), stream=stream
        )
    assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
    assert caught.value.request_id
    assert len(answers) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_exhausted_limit_raises(eager: openai.AsyncOpenAI, stream: bool) -> None:
    once = eager.with_options(max_retries=0)
    for _ in range(LIMIT):
        await once.chat.completions.create(**about("x", model="m"))
    with pytest.raises(openai.RateLimitError) as caught:
        await once.chat.completions.create(**about("x", model="m"), stream=stream)
    assert (caught.value.status_code, caught.value.code) == (429, "rate_limit_exceeded")
    assert caught.value.response.headers["retry-after"] == str(RETRY_AFTER_S)
    assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_retry_waits_until_the_limit_has_refilled(
    eager: openai.AsyncOpenAI, answers: list[httpx2.Response]
) -> None:
    for _ in range(LIMIT):
        await eager.chat.completions.create(**about("x", model="m"))
    answers.clear()
    refused_s = time.monotonic()
    await eager.chat.completions.create(**about("x", model="m"))
    assert [answer.status_code for answer in answers] == [429, 200]
    # By default, the client would have retried within half a second.
    assert time.monotonic() - refused_s >= RETRY_AFTER_S
