"""Streams through Serve's own proxy; `test_front_door` has them through HAProxy."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.ray.twins import DEADLINE_S, MODEL, Twins
from tests.serve_app.sse_decoder import events_of

NUM_PASSING = 3
BODY = {"prompt": "go", "ignore_eos": True, "temperature": 0, "max_tokens": 200}


@pytest.fixture
async def client(twins: Twins) -> AsyncIterator[httpx.AsyncClient]:
    async with twins.client() as client:
        yield client
    await twins.let_go()


async def test_a_refused_stream_is_answered_with_an_error_status(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "x" * 5000}]
    body = {"model": MODEL, "messages": messages, "stream": True}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def busy(twins: Twins, num: int) -> list[int]:
    """Wait until so many replicas have streams open; return their processes."""
    async with asyncio.timeout(DEADLINE_S):
        while len(found := await twins.busy()) != num:
            pass
    return found


async def test_a_killed_replica_s_stream_goes_on_and_has_the_text_of_the_whole_answer(
    client: httpx.AsyncClient, twins: Twins
) -> None:
    whole = await client.post("/text-generation", json={**BODY, "stream": False})
    await busy(twins, 0)
    await twins.hold(NUM_PASSING)
    lines: list[str] = []
    async with client.stream("POST", "/text-generation", json=BODY) as stream:
        async for line in stream.aiter_lines():
            lines.append(line)
            if len(lines) == 1:
                (victim,) = await busy(twins, 1)
                os.kill(victim, signal.SIGKILL)
            if line == ": moved":
                await twins.let_go()
    *events, done = events_of("\n".join([*lines, ""]).encode())
    assert done == "[DONE]"
    assert "".join(event["text"] for event in events) == whole.json()["response"]
    assert sum(event["token_count"] for event in events) == BODY["max_tokens"]
    assert lines.count(": moved") == 1
