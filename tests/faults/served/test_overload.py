"""Ten times as many clients as the replicas admit, and a death among it."""

import asyncio
import json
from dataclasses import dataclass, field

import httpx
import pytest

from tests.faults.served.answer import Answer, assert_equal, opened, read
from tests.faults.served.conftest import MAX_NUM_SEQS, NUM_QUEUED, NUM_REPLICAS, Memory
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.replicas import Replicas, kill, reached
from tests.measured import Record

NUM_CLIENTS = 10 * NUM_REPLICAS * (MAX_NUM_SEQS + NUM_QUEUED)
NUM_TOKENS = 300
BODY = about("os.path.join", **SEEDED, max_tokens=NUM_TOKENS)
BACKOFF_S = 1
"""A refused client comes back sooner than it is told."""

MAX_GROWTH_BYTES = 100 * 2**20


@dataclass
class Crowd:
    """Clients that ask again and again until they are told to stop."""

    client: httpx.AsyncClient
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    asking: dict[str, Answer] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    refusals: list[Answer] = field(default_factory=list)

    async def ask(self) -> None:
        while not self.is_over.is_set():
            async with opened(self.client, BODY) as stream:
                answer = stream.answer
                if answer.status == 200:
                    self.asking[answer.request_id] = answer
                    await stream.read_to_end()
                    del self.asking[answer.request_id]
            (self.refusals if answer.status == 503 else self.answers).append(answer)
            if answer.status == 503:
                await asyncio.sleep(BACKOFF_S)

    async def press(self, duration_s: float) -> None:
        """Ask for some seconds."""
        self.is_over.clear()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CLIENTS):
                tasks.create_task(self.ask())
            await asyncio.sleep(duration_s)
            self.is_over.set()

    @property
    def begun(self) -> str | None:
        """The id of a request whose answer has only just begun."""
        early = (name for name, a in self.asking.items() if 0 < a.num_tokens < NUM_TOKENS // 4)
        return next(early, None)


async def kill_one_after(crowd: Crowd, replicas: Replicas, delay_s: float) -> None:
    """Kill the replica of an answer that has begun, some seconds after the first request."""
    await asyncio.sleep(delay_s)
    await reached(lambda: crowd.begun is not None)
    assert crowd.begun is not None
    kill(replicas.runs_of(crowd.begun)[-1])


def assert_clean(refusal: Answer) -> None:
    assert json.loads(refusal.body)["error"]["code"] == "overloaded"
    assert 1 <= int(refusal.headers["retry-after"]) <= 60


@pytest.mark.parametrize("duration_s", [6, pytest.param(60, marks=pytest.mark.soak)])
async def test_refusals_are_clean_and_admitted_answers_whole(
    client: httpx.AsyncClient,
    replicas: Replicas,
    memory: Memory,
    record: Record,
    duration_s: int,
) -> None:
    expected = await read(client, BODY)
    await Crowd(client).press(2)
    before = memory.of_the_ingress()
    crowd = Crowd(client)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(crowd.press(duration_s))
        tasks.create_task(kill_one_after(crowd, replicas, duration_s / 3))
    growth = memory.of_the_ingress() - before
    assert_equal(crowd.answers, [expected] * len(crowd.answers))
    for refusal in crowd.refusals:
        assert_clean(refusal)
    assert crowd.refusals
    assert any(answer.lost_at for answer in crowd.answers)
    assert growth < MAX_GROWTH_BYTES
    record("clients", NUM_CLIENTS)
    record("answers", len(crowd.answers))
    record("refusals", len(crowd.refusals))
    record("streams moved", sum(bool(answer.lost_at) for answer in crowd.answers))
    record("growth of the ingress, MiB", round(growth / 2**20, 1))
