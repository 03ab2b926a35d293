"""Replicas are killed while many streams run: the clients see pauses, and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import httpx
import pytest

from tests.faults.served.answer import Answer, Stream, assert_equal, read, slow_streams
from tests.faults.served.conftest import NUM_REPLICAS
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.replicas import Replicas, is_alive, kill, reached
from tests.measured import Record

NUM_STREAMS = 16
NAMES = ("os.path.join", "os.path.split", "os.stat", "os.walk")
BODIES = [
    about(NAMES[i % len(NAMES)], **SEEDED | {"seed": i}, logprobs=i % 2 == 0, max_tokens=300)
    for i in range(NUM_STREAMS)
]


@pytest.fixture
async def expected(client: httpx.AsyncClient, replicas: Replicas) -> list[Answer]:
    """Return the undisturbed answers."""
    return list(await asyncio.gather(*(read(client, body) for body in BODIES)))


@pytest.fixture
async def streams(client: httpx.AsyncClient, expected: list[Answer]) -> AsyncIterator[list[Stream]]:
    """Open a stream for each of the bodies; all of them have tokens.

    A request without any is a suspect from its first death on.
    """
    async with slow_streams(client, BODIES, uuid4().hex) as streams:
        yield streams


async def read_all(streams: list[Stream]) -> list[Answer]:
    return list(await asyncio.gather(*(stream.read_to_end() for stream in streams)))


def check(answers: list[Answer], expected: list[Answer], record: Record, *, num_moved: int) -> None:
    assert_equal(answers, expected)
    moved = [answer for answer in answers if answer.lost_at]
    assert len(moved) >= num_moved
    record("streams moved", len(moved))
    record("tokens received when lost", sorted(at for each in moved for at in each.lost_at))
    record("longest pause, s", round(max(answer.longest_gap_s for answer in answers), 2))


async def test_streams_of_one_of_two_replicas_are_equal(
    streams: list[Stream], expected: list[Answer], replicas: Replicas, record: Record
) -> None:
    await streams[0].read_tokens(20)
    (victim,) = replicas.runs_of(streams[0].answer.request_id)
    kill(victim)
    answers = await read_all(streams)
    check(answers, expected, record, num_moved=1)


async def test_streams_of_both_replicas_one_after_the_other_are_equal(
    streams: list[Stream], expected: list[Answer], replicas: Replicas, record: Record
) -> None:
    await streams[0].read_tokens(20)
    first = replicas.runs_of(streams[0].answer.request_id)[-1]
    kill(first)
    await streams[0].read_comment("moved")
    second = replicas.runs_of(streams[0].answer.request_id)[-1]
    assert second != first
    kill(second)
    answers = await read_all(streams)
    check(answers, expected, record, num_moved=NUM_STREAMS)


async def test_streams_wait_for_a_replica_if_none_is_left(
    streams: list[Stream], expected: list[Answer], replicas: Replicas, record: Record
) -> None:
    await streams[0].read_tokens(20)
    for victim in replicas.alive:
        kill(victim)
    answers = await read_all(streams)
    check(answers, expected, record, num_moved=NUM_STREAMS)
    assert all("waiting" in answer.comments for answer in answers)


async def test_a_whole_answer_is_equal(client: httpx.AsyncClient, replicas: Replicas) -> None:
    body = {**BODIES[0], "stream": False}
    undisturbed = (await client.post("/v1/chat/completions", json=body)).json()
    headers = {"X-Request-Id": "slow-whole"}
    answer = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=headers))
    await reached(lambda: bool(replicas.runs_of("slow-whole")))
    (victim,) = replicas.runs_of("slow-whole")
    await reached(lambda: replicas.counts_of(victim)["num_sequences"] > 0)
    kill(victim)
    response = await answer
    assert len(replicas.runs_of("slow-whole")) > 1
    assert response.status_code == 200
    assert response.json()["choices"] == undisturbed["choices"]
    assert response.json()["usage"]["completion_tokens"] == BODIES[0]["max_tokens"]
    assert not is_alive(victim)
    await replicas.complete(NUM_REPLICAS)
