"""Replicas come and go with the load, and no request is lost on the way.

`tests/deployments/test_autoscaling.py` has short twins of the soaks, with a simulated server.
No other module with the same file comes later: it would wait for the replicas that the last test
here has let start.
"""

import asyncio
from contextlib import suppress

import httpx
import pytest

from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import Replicas, kill, reached
from tests.faults.served.sizes import MAX_NUM_SEQS, MODEL_SECTION
from tests.measured import Record
from tests.scaling.conftest import MAX_NUM_REPLICAS
from tests.scaling.load import Load, clients, watched

BURST_S = 2.0
BURST_INTERVAL_S = 20.0
NUM_BURSTS = 9
RAMP_S = 120.0
NUM_CLIENTS = 40
NUM_FEW = 3


async def test_replicas_come_with_forty_clients_although_one_dies_and_go_with_them(
    client: httpx.AsyncClient, deployed: Deployed, replicas: Replicas, record: Record
) -> None:
    await reached(lambda: len(replicas.alive) == 1)
    (first,) = replicas.alive
    load = Load()
    async with watched(deployed) as targets, clients(client, NUM_FEW, load):
        async with clients(client, NUM_CLIENTS - NUM_FEW, load):
            await reached(lambda: targets.last == MAX_NUM_REPLICAS)
            kill(first)  # while the others start
            up_s = await reached(lambda: are_busy(replicas, MAX_NUM_REPLICAS))
            assert targets.num_turns == 0, "the target is kept"
        down_s = await reached(lambda: len(replicas.alive) == 1)
    load.require_whole()
    assert targets.num_turns == 1
    moved = [answer for answer in load.answers if answer.lost_at]
    assert moved
    record("answers that moved", len(moved))
    record("longest pause, s", max(round(each.longest_gap_s, 2) for each in moved))
    record("seconds from the death until three replicas served", round(up_s, 1))
    record("seconds from the last answer of the others until one was left", round(down_s, 1))
    record("targets, and seconds when each was first seen", targets.timed())
    record("answers", len(load.answers))


@pytest.mark.soak
async def test_bursts_do_not_make_replicas_come_and_go(
    client: httpx.AsyncClient, deployed: Deployed, replicas: Replicas, record: Record
) -> None:
    await reached(lambda: len(replicas.alive) == 1)
    scaling = deployed.section(MODEL_SECTION)["autoscaling_config"]
    scaling["downscale_delay_s"] = 30  # as shipped: longer than the pauses
    await deployed.apply()
    await deployed.settled()
    load = Load()
    async with watched(deployed) as targets:
        for _ in range(NUM_BURSTS):
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(BURST_INTERVAL_S))
                group.create_task(burst(client, load))
    load.require_whole_or_refused()
    assert targets.num_turns == 0
    record("targets", targets.numbers())
    record("answers and refusals", (len(load.answers) - len(load.refused), len(load.refused)))


async def burst(client: httpx.AsyncClient, load: Load) -> None:
    async with clients(client, NUM_CLIENTS, load):
        await asyncio.sleep(BURST_S)


@pytest.mark.soak
async def test_a_ramp_and_silence(
    client: httpx.AsyncClient, deployed: Deployed, replicas: Replicas, record: Record
) -> None:
    await reached(lambda: len(replicas.alive) == 1)
    load = Load()
    async with watched(deployed) as targets, asyncio.TaskGroup() as group:
        for number in range(NUM_CLIENTS):
            group.create_task(several(client, load, 1 + int((NUM_CLIENTS - number) * RAMP_S / 80)))
            await asyncio.sleep(RAMP_S / NUM_CLIENTS)
    async with watched(deployed) as after:
        down_s = await reached(lambda: len(replicas.alive) == 1)
    load.require_whole()
    assert max(targets.numbers()) > 1
    assert after.last == 1
    record("targets", [*targets.numbers(), *after.numbers()])
    record("seconds of silence until one replica was left", round(down_s, 1))


async def several(client: httpx.AsyncClient, load: Load, number: int) -> None:
    for _ in range(number):
        await load.ask(client)


def are_busy(replicas: Replicas, number: int) -> bool:
    """Whether as many replicas live, and each runs a sequence."""
    alive = replicas.alive
    return len(alive) == number and all(
        replicas.counts_of(each)["num_sequences"] > 0 for each in alive
    )


async def test_refusals_raise_the_target(
    client: httpx.AsyncClient, deployed: Deployed, replicas: Replicas, record: Record
) -> None:
    await reached(lambda: len(replicas.alive) == 1)
    deployed.section(MODEL_SECTION)["user_config"]["max_queued_requests"] = 0
    await deployed.apply()
    await deployed.settled()
    load = Load()
    # What runs is worth one replica and a quarter: without refusals two would do.
    async with watched(deployed) as targets, clients(client, MAX_NUM_SEQS, load):
        while targets.last < MAX_NUM_REPLICAS:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await asyncio.gather(*(load.ask(client) for _ in range(4)))
    load.require_whole_or_refused()
    assert load.refused
    record("targets", targets.numbers())
    record("answers and refusals", (len(load.answers) - len(load.refused), len(load.refused)))
