"""Ten times as many clients as the replicas admit, and a death among it."""

import asyncio
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import httpx

from tests.changing_server import ChangingServer
from tests.faults.served.answer import Answer, opened, read
from tests.faults.served.fragile_server import client_of
from tests.faults.served.ingresses import Ingresses
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.replicas import Replicas, kill, reached
from tests.faults.served.sizes import MAX_NUM_SEQS, NUM_QUEUED, NUM_REPLICAS
from tests.faults.served.tracing import parent

NUM_CLIENTS = 10 * NUM_REPLICAS * (MAX_NUM_SEQS + NUM_QUEUED)
NUM_TOKENS = 300
BODY = about("os.path.join", **SEEDED, max_tokens=NUM_TOKENS)
BACKOFF_S = 1
"""A refused client comes back sooner than it is told."""

WARM_S = 2
TRACES = count(10_000)
TRACED = 20
"""One of so many requests is traced."""


@dataclass
class Crowd:
    """Clients that ask again and again until they are told to stop."""

    client: httpx.AsyncClient
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    asking: dict[str, Answer] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    refusals: list[Answer] = field(default_factory=list)
    # The numbers of traces of refused requests.
    refused_traces: list[int] = field(default_factory=list)

    async def ask(self) -> None:
        """Ask until it is over."""
        while not self.is_over.is_set():
            trace = next(TRACES)
            is_traced = trace % TRACED == 0
            async with opened(self.client, BODY, headers=parent(trace, is_traced)) as stream:
                answer = stream.answer
                if answer.status == 200:
                    self.asking[answer.request_id] = answer
                    await stream.read_to_end()
                    del self.asking[answer.request_id]
            (self.refusals if answer.status == 503 else self.answers).append(answer)
            if answer.status == 503:
                if is_traced:
                    self.refused_traces.append(trace)
                await asyncio.sleep(BACKOFF_S)

    @asynccontextmanager
    async def pressing(self) -> AsyncIterator[None]:
        """Ask while the block runs, and read all answers that have begun."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CLIENTS):
                tasks.create_task(self.ask())
            yield
            self.is_over.set()

    @property
    def begun(self) -> str | None:
        """The id of the request whose answer has begun last."""
        begun = {name: a.num_tokens for name, a in self.asking.items() if a.num_tokens}
        return min(begun, key=begun.__getitem__, default=None)

    @property
    def num_moved(self) -> int:
        """How many answers have told until now that they moved."""
        return sum(bool(answer.lost_at) for answer in (*self.asking.values(), *self.answers))

    async def until_moved_or_ended(self, request_ids: Set[str]) -> None:
        """Wait until an answer has moved, or all answers to some requests have ended."""
        await reached(lambda: bool(self.num_moved) or request_ids.isdisjoint(self.asking))


@dataclass(frozen=True)
class Pressed:
    """What a crowd got."""

    expected: Answer  # the undisturbed answer
    crowd: Crowd
    growth_bytes: int  # how much the ingress has grown


async def pressed(changing_server: ChangingServer, duration_s: float) -> Pressed:
    """Let the crowd ask, and kill a replica meanwhile."""
    await asyncio.to_thread(changing_server.settle)
    replicas, ingresses = Replicas(changing_server.folder), Ingresses(changing_server.server)
    async with client_of(changing_server.server) as client:
        expected = await read(client, BODY)
        async with Crowd(client).pressing():
            await asyncio.sleep(WARM_S)
        before = ingresses.rss_bytes()
        crowd = Crowd(client)
        async with crowd.pressing():
            await asyncio.gather(
                asyncio.sleep(duration_s), _lose_one_after(crowd, replicas, duration_s / 3)
            )
        return Pressed(expected, crowd, ingresses.rss_bytes() - before)


async def _lose_one_after(crowd: Crowd, replicas: Replicas, delay_s: float) -> None:
    """Kill the replica of an answer that has begun, some seconds after the first request.

    The clients read more slowly than the replicas write, so that replica may have sent all that it
    had: then there was nothing to lose, and another one is killed.
    """
    await asyncio.sleep(delay_s)
    while not crowd.num_moved:
        await reached(lambda: crowd.begun is not None)
        assert crowd.begun is not None
        kill(replicas.runs_of(crowd.begun)[-1])
        await crowd.until_moved_or_ended(frozenset(crowd.asking))
