"""One of two ingresses is killed at random moments; clients go on through the other.

The ingresses are processes, and their replica is a real one, in this process. Several pairs of
ingresses share it, so their streams run in the same steps.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from itertools import count
from random import Random
from typing import Any

import httpx
import pytest

from deployments.generator_replica import GeneratorReplica
from tests.faults import test_lost_at_each_token
from tests.faults.ingress_process import Ingress, context, listening_replica
from tests.faults.resuming_client import ResumingClient, essence
from tests.measured import Record
from tests.serve_app.local_replica import local_generator

NUM_TOKENS = 120
TEXT = {**test_lost_at_each_token.TEXT, "max_tokens": NUM_TOKENS}
SEEDED: dict[str, Any] = {**TEXT, "temperature": 1.2, "seed": 7}
ROWS: dict[str, Any] = {
    "type": "object",
    "properties": {"depths": {"type": "array", "items": {"type": "integer"}, "minItems": 30}},
    "required": ["depths"],
}
CALL = {"type": "function", "function": {"name": "look_up", "parameters": ROWS}}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": TEXT,
    "sampled": SEEDED,
    "n=3": {**SEEDED, "n": 3},
    "tools": {**SEEDED, "tools": [CALL], "tool_choice": "required"},
}
DEADLINE_S = 120
MANY, FEW = (5, 4), (2, 3)
"""Pairs, which work at the same time, and kills of each one's ingresses, one after the other."""


@pytest.fixture(scope="module")
def generator() -> Iterator[GeneratorReplica]:
    with local_generator(
        test_lost_at_each_token.FOLDER, max_model_len=384, max_num_seqs=32
    ) as made:
        yield made


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=DEADLINE_S, limits=limits) as client:
        yield client


class Pair:
    """Two ingresses in front of the replica; a dead one is replaced at once."""

    def __init__(self, start: Callable[[], Ingress]) -> None:
        self._start = start
        self._ingresses = [start(), start()]
        self._turns = count()

    def url(self) -> str:
        """Return the address of one of them, and of the other the next time."""
        return self._ingresses[next(self._turns) % 2].url

    def kill(self, victim: int) -> None:
        self._ingresses[victim].kill()
        self._ingresses[victim] = self._start()

    def end(self) -> None:
        for ingress in self._ingresses:
            ingress.kill()


async def read_through_kills(
    pair: Pair,
    client: httpx.AsyncClient,
    expected: Mapping[str, object],
    random: Random,
    num_kills: int,
) -> tuple[int, int]:
    """Kill one of a pair under streams, several times; return how many were read, and resumed."""
    num_answers = num_resumed = 0
    for _ in range(num_kills):
        readers = [ResumingClient(client, body, pair.url) for body in KINDS.values()]
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        async with asyncio.timeout(DEADLINE_S):
            await random.choice(readers).wait_for(random.randrange(NUM_TOKENS))
            pair.kill(random.randrange(2))
            answers = await asyncio.gather(*reading)
        for kind, answer in zip(KINDS, answers, strict=True):
            assert essence(answer) == expected[kind], kind
        num_answers += len(answers)
        num_resumed += sum(reader.num_resumed > 0 for reader in readers)
    return num_answers, num_resumed


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "num_pairs", "kills_of_each"),
    [(0, *FEW), *(pytest.param(seed, *MANY, marks=pytest.mark.soak) for seed in range(10))],
)
async def test_streams_of_killed_ingresses_are_resumed_and_equal(
    generator: GeneratorReplica,
    client: httpx.AsyncClient,
    record: Record,
    seed: int,
    num_pairs: int,
    kills_of_each: int,
) -> None:
    processes, description = context(), await generator.describe()
    async with listening_replica(generator) as port:
        pairs = [Pair(partial(Ingress, processes, description, port)) for _ in range(num_pairs)]
        try:
            undisturbed = [ResumingClient(client, body, pairs[0].url) for body in KINDS.values()]
            expected = {
                kind: essence(await each.read())
                for kind, each in zip(KINDS, undisturbed, strict=True)
            }
            async with asyncio.TaskGroup() as tasks:
                counts = [
                    tasks.create_task(
                        read_through_kills(
                            pair, client, expected, Random(seed * num_pairs + at), kills_of_each
                        )
                    )
                    for at, pair in enumerate(pairs)
                ]
        finally:
            for pair in pairs:
                pair.end()
    results = [count.result() for count in counts]
    num_answers, num_resumed = (sum(column) for column in zip(*results, strict=True))
    num_kills = num_pairs * kills_of_each
    record("kills, answers, of which resumed", (num_kills, num_answers, num_resumed))
    assert num_resumed > num_kills // 2
