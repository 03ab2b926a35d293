"""Replicas are taken away while streams run: the streams move before their replicas end."""

import asyncio
import time

import httpx

from tests.faults.served.answer import assert_equal, read, slow_streams
from tests.faults.served.conftest import MODEL_SECTION
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import Replicas, is_alive, reached
from tests.measured import Record

NUM_STREAMS = 12
NAMES = ("os.path.join", "os.path.split", "os.stat", "os.walk")
BODIES = [
    about(NAMES[i % len(NAMES)], **SEEDED | {"seed": i}, logprobs=i % 2 == 0, max_tokens=600)
    for i in range(NUM_STREAMS)
]


async def test_streams_of_replicas_that_are_scaled_down_move_and_are_equal(
    client: httpx.AsyncClient, deployed: Deployed, replicas: Replicas, record: Record
) -> None:
    expected = list(await asyncio.gather(*(read(client, body) for body in BODIES)))
    deployed.section(MODEL_SECTION)["num_replicas"] = 3
    await deployed.apply()
    await replicas.complete(3)
    await deployed.settled()
    async with slow_streams(client, BODIES, "down") as streams:
        before = set(replicas.alive)
        used = {pid for each in streams for pid in replicas.runs_of(each.answer.request_id)}
        assert (used, len(used)) == (before, 3)
        deployed.section(MODEL_SECTION)["num_replicas"] = 1
        asked_s = time.monotonic()
        await deployed.apply()
        reading = [asyncio.create_task(each.read_to_end()) for each in streams]
        await reached(lambda: len(replicas.alive) == 1)
        ended_s = time.monotonic() - asked_s
        assert not any(task.done() for task in reading), "the streams outlive the replicas"
        answers = await asyncio.gather(*reading)
    assert_equal(answers, expected)
    (left,) = replicas.alive
    for runs in (replicas.runs_of(each.request_id) for each in answers):
        assert runs[-1] == left
    moved = [each for each in answers if replicas.runs_of(each.request_id)[0] != left]
    assert {each.request_id for each in answers if each.lost_at} == {
        each.request_id for each in moved
    }
    assert all(len(replicas.runs_of(each.request_id)) == 2 for each in moved)
    assert not any(is_alive(each) for each in before - {left})
    record("streams moved", len(moved))
    moved_s = sorted(round(at - asked_s, 2) for each in moved for at in each.moved_at_s)
    record("seconds from the request to Serve until moved", moved_s)
    record("seconds until two of three replicas have ended", round(ended_s, 2))
    record("longest pause, s", round(max(each.longest_gap_s for each in answers), 2))
