"""Replicas are scaled down while many streams are parked: nothing is lost or doubled.

test_deaths.py kills a replica then. In process, `tests/faults/test_parked.py` parks many streams,
and `test_lost_at_each_token.py` each kind at each token.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.faults.served.answer import Answer, assert_equal, read, slow_streams
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import Replicas, reached
from tests.faults.served.sizes import MAX_NUM_SEQS, MODEL_SECTION, NUM_REPLICAS
from tests.measured import Record

GRACE_S = 60
NAMES = ("os.path.join", "os.path.split", "os.stat", "os.walk")
PLACES = NUM_REPLICAS * MAX_NUM_SEQS
NUM_BETTER = PLACES // 2
NUM_PARKED = PLACES // 4
"""So many streams are parked at least when something ends."""

BODIES = [about(NAMES[i % 4], **SEEDED | {"seed": i}, max_tokens=200) for i in range(PLACES)]
LOW = [body | {"priority": 5} for body in BODIES]


async def parked_meanwhile(
    client: httpx.AsyncClient,
    replicas: Replicas,
    record: Record,
    disturb: Callable[[], Awaitable[Any]],
    max_tokens: int = 200,
) -> list[Answer]:
    """Fill all places, let better requests come, and disturb once many streams are parked.

    They are slow until `disturb` returns.

    Returns:
        All answers, which are equal to undisturbed ones.
    """
    length = {"max_tokens": max_tokens, "min_tokens": max_tokens}
    bodies, low = [each | length for each in BODIES], [each | length for each in LOW]
    name = uuid4().hex
    expected = list(await asyncio.gather(*(read(client, body) for body in bodies)))
    async with slow_streams(client, low, name, "held") as streams:
        reading = [asyncio.ensure_future(stream.read_to_end()) for stream in streams]
        async with slow_streams(client, bodies[:NUM_BETTER], f"{name}-better", "held") as better:
            reading += [asyncio.ensure_future(stream.read_to_end()) for stream in better]
            await reached(lambda: num_parked(each.answer for each in streams) >= NUM_PARKED)
            await disturb()
            replicas.release(name)
            answers = list(await asyncio.gather(*reading))
    assert_equal(answers, [*expected, *expected[:NUM_BETTER]])
    assert num_parked(answers[PLACES:]) == 0
    record("parked, of the low ones", num_parked(answers))
    record("longest pause, s", round(max(answer.longest_gap_s for answer in answers), 2))
    return answers


def num_parked(answers: Iterable[Answer]) -> int:
    """Return how many answers were parked at least once."""
    return sum("parked" in answer.comments for answer in answers)


@pytest.mark.soak
async def test_streams_are_equal_if_a_replica_is_scaled_down_while_many_are_parked(
    client: httpx.AsyncClient,
    deployed: Deployed,
    replicas: Replicas,
    record: Record,
) -> None:
    section = deployed.section(MODEL_SECTION)
    section["graceful_shutdown_timeout_s"] = GRACE_S
    await deployed.apply()
    await deployed.settled()
    before = set(replicas.alive)

    async def drain() -> None:
        section["num_replicas"] = 1
        await deployed.apply()

    answers = await parked_meanwhile(client, replicas, record, drain, max_tokens=600)
    await deployed.settled()
    await reached(lambda: len(before & set(replicas.alive)) == 1)
    left = set(replicas.alive)
    ended_at = [replicas.runs_of(answer.request_id)[-1] for answer in answers]
    num_elsewhere = sum(
        len(replicas.runs_of(answer.request_id)) > 1 and at in left
        for answer, at in zip(answers, ended_at, strict=True)
    )
    record("went on at a replica that was left", num_elsewhere)
    assert num_elsewhere
