"""Loads, and what comes of them: answers, refusals, and the number of replicas over time."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import httpx

from tests.faults.served.answer import Answer, read
from tests.faults.served.kinds import about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.sizes import MODEL_SECTION

QUESTION = about("os.path.join", max_tokens=60)
"""About a second and a half of slow steps."""

SLOW_IDS = map("slow-load-{}".format, count())
"""New ids of requests whose steps `FragileGenerator` slows down: they take time, and little CPU."""


@dataclass
class Load:
    """The answers to a load."""

    answers: list[Answer] = field(default_factory=list)  # in the order of their ends

    @property
    def refused(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.status == 503]

    def require_whole_or_refused(self) -> None:
        """Fail if an answer is neither whole nor was refused."""
        for answer in self.answers:
            assert answer.is_whole or answer.status == 503, (answer.request_id, answer.error)

    def require_whole(self) -> None:
        """Fail if an answer is not whole."""
        self.require_whole_or_refused()
        assert self.refused == []

    async def ask(self, client: httpx.AsyncClient, body: Mapping[str, Any] = QUESTION) -> None:
        self.answers.append(await read(client, body, request_id=next(SLOW_IDS)))


@asynccontextmanager
async def clients(client: httpx.AsyncClient, number: int, load: Load) -> AsyncIterator[None]:
    """Let clients ask again and again during the block; then each reads its answer to the end."""
    is_over = asyncio.Event()

    async def ask() -> None:
        while not is_over.is_set():
            await load.ask(client)

    asking = [asyncio.create_task(ask()) for _ in range(number)]
    try:
        yield
    finally:
        is_over.set()
        await asyncio.gather(*asking)


@dataclass
class Targets:
    """The number of replicas that the controller wants, whenever it changes."""

    # The numbers, each after the loop's time at which it was first seen.
    seen: list[tuple[float, int]] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The current target."""
        return self.seen[-1][1]

    @property
    def num_turns(self) -> int:
        """How often they have changed their direction."""
        steps = [b - a for (_, a), (_, b) in pairwise(self.seen)]
        return sum(a * b < 0 for a, b in pairwise(steps))

    def timed(self) -> list[tuple[float, int]]:
        """Return the numbers, each with the seconds since the first was seen."""
        return [(round(at_s - self.seen[0][0], 1), number) for at_s, number in self.seen]

    def numbers(self) -> list[int]:
        """Return the numbers in order."""
        return [number for _, number in self.seen]


@asynccontextmanager
async def watched(deployed: Deployed) -> AsyncIterator[Targets]:
    """Note the targets during the block."""
    targets = Targets()

    async def look() -> None:
        details = await deployed.details()
        number = details["deployments"][MODEL_SECTION]["target_num_replicas"]
        if not targets.seen or targets.last != number:
            targets.seen.append((asyncio.get_running_loop().time(), number))

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.2)  # the controller is another process, so this polls
            await look()

    await look()
    watching = asyncio.create_task(watch())
    try:
        yield targets
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
