"""An engine that hangs, dies or raises, while its process lives: its streams move at once."""

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest

from tests.faults.served.answer import assert_equal, opened, read
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.replicas import Replicas, is_alive, reached
from tests.faults.served.sizes import NUM_REPLICAS
from tests.measured import Record

NUM_STREAMS = 8
BODIES = [
    about("os.path.join", **SEEDED | {"seed": seed}, max_tokens=500) for seed in range(NUM_STREAMS)
]


@pytest.mark.parametrize(
    "fault",
    [
        "hang",
        "raise",
        # To others an engine that ends is as one that raises: tests/generator/test_async_engine.py.
        pytest.param("end", marks=pytest.mark.soak),
    ],
)
async def test_streams_of_an_engine_that_fails_are_equal_and_its_replica_is_replaced(
    client: httpx.AsyncClient, replicas: Replicas, record: Record, fault: str
) -> None:
    expected = await asyncio.gather(*(read(client, body) for body in BODIES))
    faulty = f"{fault}-at-40-stream"
    names = [faulty, *(None for _ in BODIES[1:])]
    now_s = asyncio.get_running_loop().time
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(opened(client, body, request_id=name))
            for body, name in zip(BODIES, names, strict=True)
        ]
        await streams[0].read_tokens(20)
        victim = replicas.runs_of(faulty)[0]  # it may have moved already
        reading = asyncio.gather(*(stream.read_to_end() for stream in streams))
        await reached(lambda: replicas.has_failed(faulty))
        began_s = now_s()
        await reached(lambda: not is_alive(victim))
        record("until its process had ended, s", round(now_s() - began_s, 1))
        await replicas.complete(NUM_REPLICAS)
        record("until another was up, s", round(now_s() - began_s, 1))
        answers = await reading
    assert_equal(answers, expected)
    assert answers[0].lost_at
    record("streams moved", sum(bool(answer.lost_at) for answer in answers))
    record("longest pause, s", round(max(answer.longest_gap_s for answer in answers), 2))
