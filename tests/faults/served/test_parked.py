"""Replicas and ingresses go while many streams are parked: nothing is lost or doubled.

A scale-down, a redeploy, and the death of one of two ingresses; test_deaths.py kills a replica
then. In process, `tests/faults/test_parked.py` parks many streams and replaces their replica,
`test_killed_ingresses.py` kills an ingress, and `test_lost_at_each_token.py` parks each kind at
each token.
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
from tests.faults.served.replicas import Replicas, is_alive, kill, reached
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
) -> list[Answer | httpx.TransportError]:
    """Fill all places, let better requests come, and disturb once many streams are parked.

    They are slow until `disturb` returns.

    Returns:
        All outcomes; answers are equal to undisturbed ones.
    """
    length = {"max_tokens": max_tokens, "min_tokens": max_tokens}
    bodies, low = [each | length for each in BODIES], [each | length for each in LOW]
    name = uuid4().hex
    expected = list(await asyncio.gather(*(read(client, body) for body in bodies)))
    async with slow_streams(client, low, name, "held") as streams:
        reading = [asyncio.ensure_future(stream.outcome()) for stream in streams]
        async with slow_streams(client, bodies[:NUM_BETTER], f"{name}-better", "held") as better:
            reading += [asyncio.ensure_future(stream.outcome()) for stream in better]
            await reached(lambda: num_parked(each.answer for each in streams) >= NUM_PARKED)
            await disturb()
            replicas.release(name)
            outcomes = list(await asyncio.gather(*reading))
    expected += expected[:NUM_BETTER]
    whole = {i: found for i, found in enumerate(outcomes) if isinstance(found, Answer)}
    assert_equal(list(whole.values()), [expected[i] for i in whole])
    assert num_parked(answers_of(outcomes[PLACES:])) == 0
    record("parked, of the low ones", num_parked(whole.values()))
    record("longest pause, s", round(max(each.longest_gap_s for each in whole.values()), 2))
    return outcomes


def answers_of(outcomes: Iterable[Answer | httpx.TransportError]) -> list[Answer]:
    """Return those of the clients whose connections did not end early."""
    return [each for each in outcomes if isinstance(each, Answer)]


def num_parked(answers: Iterable[Answer]) -> int:
    """Return how many answers were parked at least once."""
    return sum("parked" in answer.comments for answer in answers)


async def give_grace(deployed: Deployed) -> None:
    """Let replicas that are stopped later keep their streams for `GRACE_S`."""
    deployed.section(MODEL_SECTION)["graceful_shutdown_timeout_s"] = GRACE_S
    await deployed.apply()
    await deployed.settled()


@pytest.mark.soak
async def test_streams_are_equal_if_a_replica_is_scaled_down_while_many_are_parked(
    client: httpx.AsyncClient,
    deployed: Deployed,
    replicas: Replicas,
    record: Record,
) -> None:
    await give_grace(deployed)
    section = deployed.section(MODEL_SECTION)
    before = set(replicas.alive)

    async def drain() -> None:
        section["num_replicas"] = 1
        await deployed.apply()

    outcomes = await parked_meanwhile(client, replicas, record, drain, max_tokens=600)
    answers = answers_of(outcomes)
    assert len(answers) == len(outcomes)
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


@pytest.mark.soak
async def test_streams_are_equal_if_all_replicas_are_replaced_while_many_are_parked(
    client: httpx.AsyncClient,
    deployed: Deployed,
    replicas: Replicas,
    record: Record,
) -> None:
    await give_grace(deployed)
    before = set(replicas.alive)

    async def deploy() -> None:
        deployed.application["args"]["limits"]["max_num_stops"] = 8
        await deployed.apply()
        await reached(lambda: not before & set(replicas.alive))

    outcomes = await parked_meanwhile(client, replicas, record, deploy, max_tokens=600)
    answers = answers_of(outcomes)
    assert len(answers) == len(outcomes)
    await deployed.settled()
    ended_at = [replicas.runs_of(answer.request_id)[-1] for answer in answers]
    num_after = sum(at not in before for at in ended_at)
    record("ended at a new replica", num_after)
    assert num_after


@pytest.mark.soak
async def test_streams_of_the_other_ingress_are_equal_if_one_dies_while_many_are_parked(
    client: httpx.AsyncClient, replicas: Replicas, two_ingresses: list[int], record: Record
) -> None:
    assert len(two_ingresses) == 2

    async def kill_ingress() -> None:
        kill(two_ingresses[0])
        await reached(lambda: not is_alive(two_ingresses[0]))

    outcomes = await parked_meanwhile(client, replicas, record, kill_ingress)
    # The fixture of the replicas fails if one of them still holds anything of a broken stream.
    num_broken = len(outcomes) - len(answers_of(outcomes))
    record("streams that were reset", num_broken)
    record("streams that went on", len(outcomes) - num_broken)
    assert 0 < num_broken < len(outcomes)
    assert num_parked(answers_of(outcomes))
