"""Clients that leave at any moment, also while their streams move."""

import asyncio
from contextlib import suppress
from random import Random

import httpx

from tests.faults.served.answer import assert_equal, opened, read
from tests.faults.served.conftest import NUM_REPLICAS
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.replicas import Replicas, kill, reached
from tests.measured import Record

NUM_CLIENTS = 200
NUM_AT_ONCE = 20
NUM_KILLS = 2
LATEST_TOKEN = 120
BODY = about("os.walk", **SEEDED, max_tokens=900)


async def leave_after(
    client: httpx.AsyncClient, num_tokens: int, places: asyncio.Semaphore
) -> None:
    """Open a stream and leave it after some tokens, or before it is accepted."""
    async with places:
        if num_tokens == 0:
            asked = asyncio.create_task(read(client, BODY))
            await asyncio.sleep(0)
            asked.cancel()
            with suppress(asyncio.CancelledError):
                await asked
            return
        async with opened(client, BODY) as stream:
            assert stream.answer.status == 200
            await stream.read_tokens(num_tokens)


async def test_200_clients_that_leave_free_every_place(
    client: httpx.AsyncClient, replicas: Replicas, record: Record
) -> None:
    expected = await read(client, BODY)
    random, places = Random(15), asyncio.Semaphore(NUM_AT_ONCE)
    leavers = [
        asyncio.create_task(leave_after(client, random.randrange(LATEST_TOKEN), places))
        for _ in range(NUM_CLIENTS)
    ]
    for part in range(1, NUM_KILLS + 1):
        await reached(
            lambda part=part: sum(map(asyncio.Task.done, leavers)) > part * NUM_CLIENTS // 4  # type: ignore[misc] # mypy does not infer defaults
        )
        kill(replicas.alive[0])
    await asyncio.gather(*leavers)
    record("until all places were free, s", round(await reached(lambda: replicas.are_idle), 2))
    await replicas.complete(NUM_REPLICAS)
    assert_equal([await read(client, BODY)], [expected])
