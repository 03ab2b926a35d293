"""The only replicas of two models are killed under load: their successors take over."""

import asyncio
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

from tests.faults.served.answer import Answer, assert_equal, opened, read
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.replicas import DEADLINE_S, reached
from tests.ray.serve_run import Server

NUM_STREAMS = 8
BODIES = [about("os.stat", **SEEDED | {"seed": i}, max_tokens=600) for i in range(NUM_STREAMS)]
NUM_REQUESTS = 8
SOME_TEXTS = {"model": "pydoc-detector", "input": ["Join two paths. " * 30] * 50}
"""Of one request; few enough for the channel."""

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Observed:
    """What clients saw."""

    expected: list[Answer]  # the streams of a server that was left alone
    answers: list[Answer]  # the streams of killed replicas
    # Those of texts that were classified once undisturbed, and once by two replicas.
    scores: tuple[Any, Any]
    readiness: list[str]  # what `/ready` said from the first kill on, without repetitions
    liveness: set[int]  # all statuses of `/live` meanwhile


@pytest.fixture(scope="module")
async def observed(shipped_server: Server) -> Observed:
    """Kill the only replica of the chat model under streams, then the classifier's at work."""
    url = shipped_server.url
    async with (
        httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client,
        asyncio.timeout(DEADLINE_S),
        AsyncExitStack() as stack,
    ):
        expected = await asyncio.gather(*(read(client, body) for body in BODIES))
        classifier = replica_of(shipped_server, "pydoc-detector")
        used_s = classifier.cpu_times().user
        scores = await classify(client)
        usual_s = classifier.cpu_times().user - used_s

        streams = [await stack.enter_async_context(opened(client, body)) for body in BODIES]
        await streams[-1].read_tokens(20)
        replica_of(shipped_server, "pydoc-chat").send_signal(signal.SIGKILL)
        watching = asyncio.create_task(watch(client))

        used_s = classifier.cpu_times().user
        asked = asyncio.create_task(classify(client))
        await reached(lambda: asked.done() or classifier.cpu_times().user > used_s + usual_s / 8)
        assert not asked.done()
        classifier.send_signal(signal.SIGKILL)

        answers = await asyncio.gather(*(stream.read_to_end() for stream in streams))
        return Observed(expected, answers, (scores, await asked), *await watching)


def replica_of(server: Server, model: str) -> psutil.Process:
    """Return the process of a model's only replica."""
    (found,) = server.processes(f"ray::ServeReplica:raystream:{model}")
    return found


async def classify(client: httpx.AsyncClient) -> Any:
    asked = (client.post("/v1/classify", json=SOME_TEXTS) for _ in range(NUM_REQUESTS))
    return [answer.raise_for_status().json()["data"] for answer in await asyncio.gather(*asked)]


async def watch(client: httpx.AsyncClient) -> tuple[list[str], set[int]]:
    """Ask until the server was not ready and is ready again."""
    readiness, liveness = list[str](), set[int]()
    while readiness[-2:] != ["not ready", "ready"]:
        liveness.add((await client.get("/live")).status_code)
        status = (await client.get("/ready")).json()["status"]
        if readiness[-1:] != [status]:
            readiness.append(status)
    return readiness, liveness


async def test_streams_of_the_only_replica_wait_and_are_equal(observed: Observed) -> None:
    assert_equal(observed.answers, observed.expected)
    for answer in observed.answers:
        assert answer.comments[0] == "waiting"
        assert answer.comments[-1] == "moved"


async def test_the_server_is_live_but_not_ready_while_a_model_has_no_replica(
    observed: Observed,
) -> None:
    assert "not ready" in observed.readiness
    assert observed.liveness == {200}


async def test_texts_of_the_only_classifier_are_classified_by_its_successor(
    observed: Observed,
) -> None:
    expected, found = observed.scores
    assert found == expected
