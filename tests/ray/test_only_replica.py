"""A model's only replica is killed, in both of Serve's modes: its successor takes over."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import psutil
import pytest

from tests.faults.served.answer import assert_equal, opened, read
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.replicas import DEADLINE_S, reached
from tests.ray.serve_run import Server

NUM_STREAMS = 8
BODIES = [about("os.stat", **SEEDED | {"seed": i}, max_tokens=600) for i in range(NUM_STREAMS)]
MANY_TEXTS = {"model": "pydoc-detector", "input": ["Join two paths. " * 30] * 400}

pytestmark = pytest.mark.slow


@pytest.fixture
async def client(shipped_server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shipped_server.url, timeout=DEADLINE_S) as client:
        yield client


def replica_of(server: Server, model: str) -> psutil.Process:
    """Return the process of a model's only replica."""
    (found,) = server.processes(f"ray::ServeReplica:raystream:{model}")
    return found


async def test_streams_of_the_only_replica_wait_and_are_equal(
    shipped_server: Server, client: httpx.AsyncClient
) -> None:
    expected = [await read(client, body) for body in BODIES]
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(opened(client, body)) for body in BODIES]
        await streams[-1].read_tokens(20)
        replica_of(shipped_server, "pydoc-chat").send_signal(signal.SIGKILL)
        answers = await asyncio.gather(*(stream.read_to_end() for stream in streams))
    assert_equal(answers, expected)
    for answer in answers:
        assert answer.comments[0] == "waiting"
        assert answer.comments[-1] == "moved"


async def test_the_server_is_live_but_not_ready_while_a_model_has_no_replica(
    shipped_server: Server, client: httpx.AsyncClient
) -> None:
    assert (await client.get("/ready")).json() == {"status": "ready"}
    replica_of(shipped_server, "pydoc-detector").send_signal(signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        while (await client.get("/ready")).json() != {"status": "not ready"}:
            assert (await client.get("/live")).status_code == 200
        while (await client.get("/ready")).status_code != 200:
            assert (await client.get("/live")).status_code == 200


async def test_texts_of_the_only_classifier_are_classified_by_its_successor(
    shipped_server: Server, client: httpx.AsyncClient
) -> None:
    async def classify() -> Any:
        answer = await client.post("/v1/classify", json=MANY_TEXTS)
        return answer.raise_for_status().json()["data"]

    replica = replica_of(shipped_server, "pydoc-detector")
    used_s = replica.cpu_times().user
    expected = await classify()
    usual_s = replica.cpu_times().user - used_s
    used_s = replica.cpu_times().user
    asked = asyncio.create_task(classify())
    await reached(lambda: replica.cpu_times().user > used_s + usual_s / 4)
    assert not asked.done()
    replica.send_signal(signal.SIGKILL)
    assert await asked == expected
