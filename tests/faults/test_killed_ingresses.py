"""One of two ingresses is killed at random moments; clients go on through the other.

The ingresses are processes, and their replica is a real one, in this process.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from deployments.text_generator import TextGenerator
from tests.faults.ingress_process import Ingress, context, listening_replica
from tests.faults.resuming_client import ResumingClient, essence
from tests.measured import Record
from tests.serve_app.local_replica import local_generator

FOLDER = Path(__file__).resolve().parents[2] / "models/pydoc-chat"
NUM_TOKENS = 120
TEXT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "What does os.path.join do?"}],
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "temperature": 0,
}
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


@pytest.fixture(scope="module")
def generator() -> Iterator[TextGenerator]:
    with local_generator(FOLDER, max_model_len=384, max_num_seqs=16) as made:
        yield made


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=DEADLINE_S, limits=limits) as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [6, pytest.param(200, marks=pytest.mark.soak)])
async def test_streams_of_killed_ingresses_are_resumed_and_equal(
    generator: TextGenerator, client: httpx.AsyncClient, record: Record, num_kills: int
) -> None:
    random, turns = Random(num_kills), count()
    processes, description = context(), await generator.describe()
    num_answers = num_resumed = 0
    async with listening_replica(generator) as port:
        ingresses = [Ingress(processes, description, port) for _ in range(2)]

        def url() -> str:
            return ingresses[next(turns) % 2].url

        undisturbed = [ResumingClient(client, body, url) for body in KINDS.values()]
        expected = [essence(await each.read()) for each in undisturbed]
        for _ in range(num_kills):
            readers = [ResumingClient(client, body, url) for body in KINDS.values()]
            reading = [asyncio.create_task(reader.read()) for reader in readers]
            async with asyncio.timeout(DEADLINE_S):
                await random.choice(readers).wait_for(random.randrange(NUM_TOKENS))
                victim = random.randrange(2)
                ingresses[victim].kill()
                ingresses[victim] = Ingress(processes, description, port)
                answers = await asyncio.gather(*reading)
            for kind, answer, known in zip(KINDS, answers, expected, strict=True):
                assert essence(answer) == known, kind
            num_answers += len(answers)
            num_resumed += sum(reader.num_resumed > 0 for reader in readers)
        for ingress in ingresses:
            ingress.kill()
    record("answers, of which resumed", (num_answers, num_resumed))
    assert num_resumed > num_kills // 2
