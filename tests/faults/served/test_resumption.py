"""One of two ingresses behind HAProxy is killed: clients resume their streams through the other.

Serve needs seconds to start another, so the suite kills more of them in `test_killed_ingresses.py`.
"""

import asyncio
from random import Random

import httpx
import pytest

from tests.faults.resuming_client import ResumingClient, essence
from tests.faults.served.answer import read
from tests.faults.served.conftest import Memory
from tests.faults.served.kinds import KINDS
from tests.faults.served.replicas import DEADLINE_S, Replicas, is_alive, kill, reached
from tests.measured import Record
from tests.ray.serve_run import Server

NAMES = ("greedy", "seeded", "several", "tools")
NUM_OF_EACH = 2


@pytest.mark.parametrize("num_kills", [2, pytest.param(200, marks=pytest.mark.soak)])
async def test_streams_of_killed_ingresses_are_resumed_and_equal(
    client: httpx.AsyncClient,
    server: Server,
    replicas: Replicas,
    memory: Memory,
    two_ingresses: list[int],
    record: Record,
    num_kills: int,
) -> None:
    random = Random(num_kills)
    expected = {name: essence(await read(client, KINDS[name])) for name in NAMES}
    num_resumed = num_answers = 0
    for _ in range(num_kills):
        await reached(lambda: len(memory.ingresses()) == 2)
        names = NAMES * NUM_OF_EACH
        readers = [ResumingClient(client, KINDS[name], lambda: server.url) for name in names]
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        async with asyncio.timeout(DEADLINE_S):
            await random.choice(readers).wait_for(random.randrange(1, 400))
            victim = random.choice(memory.ingresses())
            kill(victim)
            answers = await asyncio.gather(*reading)
        assert not is_alive(victim)
        for name, answer in zip(names, answers, strict=True):
            assert essence(answer) == expected[name], name
        num_answers += len(answers)
        num_resumed += sum(reader.num_resumed > 0 for reader in readers)
    record("answers, of which resumed", (num_answers, num_resumed))
    assert num_resumed
