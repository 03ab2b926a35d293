"""Delivered tokens are counted to the last one, whatever happens to their replicas."""

import asyncio
import time
from collections.abc import Sequence

import httpx
import pytest

from tests.faults.served.answer import Answer, opened, slow_streams
from tests.faults.served.conftest import MODEL_SECTION, NUM_REPLICAS
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import DEADLINE_S, Replicas, kill
from tests.measured import Record
from tests.prometheus import Sample, samples

NUM_STREAMS = 12
NAMES = ("os.path.join", "os.path.split", "os.stat", "os.walk")
BODIES = [
    about(NAMES[i % len(NAMES)], **SEEDED | {"seed": i}, max_tokens=300 + 10 * i)
    for i in range(NUM_STREAMS)
]
OLD_S = 1.5
"""A text of `GET /metrics` is up to a second old."""


class Totals:
    """The sums over all series, as a client of the server sees them."""

    def __init__(self, found: Sequence[Sample]) -> None:
        self._found = found

    def of(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for sample in self._found
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def replicas(self) -> set[str]:
        """Return the replicas of the model that have series."""
        name = "vllm:num_requests_running"
        return {sample.labels["replica"] for sample in self._found if sample.name == name}


async def totals(client: httpx.AsyncClient) -> Totals:
    """Return the totals of this moment."""
    asked_s = time.monotonic()
    while True:
        text = (await client.get("/metrics")).text
        if time.monotonic() - asked_s > OLD_S:
            return Totals(samples(text))
        await asyncio.sleep(0.1)  # nothing tells when a newer text is made


@pytest.fixture
async def before(client: httpx.AsyncClient, replicas: Replicas) -> Totals:
    return await totals(client)


def check(
    answers: Sequence[Answer], before: Totals, after: Totals, reason: str, record: Record
) -> None:
    """Compare what clients have counted with what the metrics have gained."""

    def gained(name: str, **labels: str) -> float:
        return after.of(name, **labels) - before.of(name, **labels)

    assert all(answer.is_whole for answer in answers)
    num_tokens = sum(answer.num_tokens for answer in answers)
    assert num_tokens == sum(body["max_tokens"] for body in BODIES)
    assert gained("raystream_delivered_tokens_total") == num_tokens
    num_prompt_tokens = sum((answer.usage or {})["prompt_tokens"] for answer in answers)
    assert gained("raystream_prompt_tokens_total") == num_prompt_tokens
    num_moved = sum(len(answer.lost_at) for answer in answers)
    assert num_moved > 0
    assert gained("raystream_streams_moved_total", reason=reason) == num_moved
    assert gained("raystream_streams_moved_total") == num_moved
    record("tokens that clients have counted, and the metrics", num_tokens)
    record("streams moved", num_moved)


async def test_streams_of_a_killed_replica(
    client: httpx.AsyncClient, replicas: Replicas, before: Totals, record: Record
) -> None:
    async with slow_streams(client, BODIES, "killed") as streams:
        await asyncio.gather(*(stream.read_tokens(20) for stream in streams))
        (victim,) = replicas.runs_of(streams[0].answer.request_id)
        kill(victim)
        answers = await asyncio.gather(*(stream.read_to_end() for stream in streams))
    check(answers, before, await totals(client), "lost", record)


async def test_streams_that_leave_their_replicas(
    client: httpx.AsyncClient, deployed: Deployed, before: Totals, record: Record
) -> None:
    async with slow_streams(client, BODIES, "left") as streams:
        deployed.section(MODEL_SECTION)["num_replicas"] = 1
        await deployed.apply()
        answers = await asyncio.gather(*(stream.read_to_end() for stream in streams))
    check(answers, before, await totals(client), "drained", record)


async def running(deployed: Deployed) -> dict[int, str]:
    """Return the names of the model's replicas that Serve routes to, by their processes."""
    replicas = (await deployed.running_replicas())[MODEL_SECTION]
    return {each["pid"]: each["replica_id"] for each in replicas}


async def test_series_are_those_of_running_replicas(
    client: httpx.AsyncClient, deployed: Deployed, replicas: Replicas
) -> None:
    async with opened(client, BODIES[0], request_id="slow-series") as stream:
        await stream.read_tokens(1)
        (victim,) = replicas.runs_of("slow-series")
        name = (await running(deployed))[victim]
        assert name in (await totals(client)).replicas()
        kill(victim)
        await stream.read_to_end()
    async with asyncio.timeout(DEADLINE_S):
        while True:
            expected = set((await running(deployed)).values()) - {name}
            if len(expected) == NUM_REPLICAS and (await totals(client)).replicas() == expected:
                break
