"""Streams run while `user_config` changes, and then all replicas but one are taken away."""

import asyncio
import time
from dataclasses import dataclass
from uuid import uuid4

from tests.changing_server import ChangingServer
from tests.faults.served.answer import Answer, read, slow_streams
from tests.faults.served.fragile_server import client_of
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import Replicas, reached
from tests.faults.served.sizes import MODEL_SECTION
from tests.faults.served.totals import Mark, mark

NUM_REPLICAS = 3
NUM_STREAMS = 12
NAMES = ("os.path.join", "os.path.split", "os.stat", "os.walk")
BODIES = [
    about(NAMES[i % len(NAMES)], **SEEDED | {"seed": i}, logprobs=i % 2 == 0, max_tokens=600)
    for i in range(NUM_STREAMS)
]


@dataclass(frozen=True)
class ScaledDown:
    """What the changes have left."""

    expected: list[Answer]  # the undisturbed answers
    answers: list[Answer]  # to the same requests, in the same order
    runs: list[list[int]]  # the processes that each was asked of, in order
    used: list[int]  # the replicas at first
    unchanged: list[int]  # those after the change of `user_config`
    moved_early: list[str]  # the requests that had moved by then
    left: int  # the replica that was left
    asked_s: float  # when Serve was asked to take the others away, by the monotonic clock
    ended_s: float  # seconds from then until their processes had ended
    num_ended_streams: int  # streams that had ended by then
    before: Mark  # the totals of the metrics
    after: Mark  # the same, once the last stream had ended


async def scaled_to_one(changing_server: ChangingServer) -> ScaledDown:
    """Start a third replica and the streams, change the file twice, and restore it."""
    async with (
        changing_server.changeable() as deployed,
        client_of(changing_server.server) as client,
    ):
        replicas = Replicas(changing_server.folder)
        section = deployed.section(MODEL_SECTION)
        section["num_replicas"] = NUM_REPLICAS
        await deployed.apply()
        await replicas.complete(NUM_REPLICAS)
        await deployed.settled()
        expected = list(await asyncio.gather(*(read(client, body) for body in BODIES)))
        before = await mark(client)
        name = uuid4().hex
        async with slow_streams(client, BODIES, name, "held") as streams:
            used = replicas.alive
            await _change_user_config(deployed)
            unchanged = replicas.alive
            ids = [stream.answer.request_id for stream in streams]
            moved_early = [each for each in ids if len(replicas.runs_of(each)) > 1]
            section["num_replicas"] = 1
            asked_s = time.monotonic()
            await deployed.apply()
            reading = [asyncio.create_task(each.read_to_end()) for each in streams]
            await reached(lambda: len(replicas.alive) == 1)
            ended_s = time.monotonic() - asked_s
            num_ended_streams = sum(task.done() for task in reading)
            replicas.release(name)
            answers = list(await asyncio.gather(*reading))
        (left,) = replicas.alive
        return ScaledDown(
            expected=expected,
            answers=answers,
            runs=[replicas.runs_of(each) for each in ids],
            used=used,
            unchanged=unchanged,
            moved_early=moved_early,
            left=left,
            asked_s=asked_s,
            ended_s=ended_s,
            num_ended_streams=num_ended_streams,
            before=before,
            after=await mark(client),
        )


async def _change_user_config(deployed: Deployed) -> None:
    section = deployed.section(MODEL_SECTION)
    section["user_config"] |= {"max_batch_size": 8, "max_queued_requests": 12}
    section["max_ongoing_requests"] += 1
    await deployed.apply()
    await deployed.settled()
