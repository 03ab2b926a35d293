"""A request that kills whatever runs it."""

import asyncio
from contextlib import AsyncExitStack
from uuid import uuid4

import httpx
import pytest

from tests.faults.served.answer import assert_equal, opened, read
from tests.faults.served.conftest import NUM_REPLICAS
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.replicas import Replicas, is_alive
from tests.measured import Record

NEIGHBOURS = [about("os.stat", **SEEDED | {"seed": seed}, max_tokens=900) for seed in range(6)]
POISON = about("os.path.join")


WAYS = {"kill-encoding": 2, "kill-at-1": 2, "kill-at-40": 3}
"""When the request kills, and how many replicas: a text that has begun is suspected later."""


@pytest.mark.parametrize(
    ("way", "num_killed"),
    [
        pytest.param(*pair, marks=() if pair[0] == "kill-encoding" else pytest.mark.soak)
        for pair in WAYS.items()
    ],
    ids=WAYS,
)
async def test_only_the_request_that_kills_fails(
    client: httpx.AsyncClient, replicas: Replicas, record: Record, way: str, num_killed: int
) -> None:
    expected = await asyncio.gather(*(read(client, body) for body in NEIGHBOURS))
    before = replicas.alive
    assert len(before) == NUM_REPLICAS
    name = f"{way}-{uuid4().hex[:8]}"
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(opened(client, body)) for body in NEIGHBOURS]
        for stream in streams:
            await stream.read_tokens(5)
        poison = await read(client, POISON, request_id=name)
        answers = await asyncio.gather(*(stream.read_to_end() for stream in streams))
    assert_equal(answers, expected)
    assert not poison.is_whole
    assert poison.num_done == 0
    code = "generation_failed"
    assert code in poison.body if poison.error is None else poison.error["code"] == code
    assert poison.status in (200, 500)
    ran = set(replicas.runs_of(name))
    killed = [process_id for process_id in ran if not is_alive(process_id)]
    await replicas.complete(NUM_REPLICAS)
    assert len(killed) == len(ran) == num_killed
    record("replicas killed", len(killed))
    record("longest pause of a neighbour, s", round(max(a.longest_gap_s for a in answers), 2))
