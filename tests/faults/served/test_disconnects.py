"""Many clients that leave at any moment, also while their streams move.

test_poison.py is the short twin: one client leaves and one vanishes while both replicas die.
"""

import asyncio
from random import Random

import httpx
import pytest

from tests.faults.served.answer import assert_equal, read
from tests.faults.served.leavers import BODY, leave_after
from tests.faults.served.replicas import Replicas, kill, reached
from tests.faults.served.sizes import NUM_REPLICAS
from tests.measured import Record

NUM_CLIENTS = 200
NUM_AT_ONCE = 20
NUM_KILLS = 2
LATEST_TOKEN = 120


@pytest.mark.soak
async def test_200_clients_that_leave_free_every_place(
    client: httpx.AsyncClient, replicas: Replicas, record: Record
) -> None:
    expected = await read(client, BODY)
    random, places = Random(15), asyncio.Semaphore(NUM_AT_ONCE)

    async def leave() -> None:
        num_tokens = random.randrange(LATEST_TOKEN)
        async with places:
            await leave_after(client, num_tokens)

    leavers = [asyncio.create_task(leave()) for _ in range(NUM_CLIENTS)]
    for part in range(1, NUM_KILLS + 1):
        await reached(
            lambda part=part: sum(map(asyncio.Task.done, leavers)) > part * NUM_CLIENTS // 4  # type: ignore[misc] # mypy does not infer defaults
        )
        kill(replicas.alive[0])
    await asyncio.gather(*leavers)
    record("until all places were free, s", round(await reached(lambda: replicas.are_idle), 2))
    await replicas.complete(NUM_REPLICAS)
    assert_equal([await read(client, BODY)], [expected])
