"""Mixed load for a quarter of an hour; replicas are killed, drained and redeployed meanwhile.

The short twins are test_deaths.py, test_roll_outs.py and test_scale_down.py; test_slow_clients.py
compares the ingress's memory and open files.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.faults.served.answer import Answer, assert_equal, opened, read
from tests.faults.served.kinds import KINDS, Body
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import Replicas, kill, reached
from tests.faults.served.sizes import NUM_REPLICAS
from tests.faults.served.usage import MIB, UsageLog, usage_of
from tests.measured import Record
from tests.ray.serve_run import Server

NUM_CLIENTS = 6
NUM_LEAVERS = 2
MAX_GROWTH_BYTES = 100 * MIB
MAX_MORE_FDS = 30
MODEL = "pydoc-chat"

Event = Callable[[], Coroutine[Any, Any, None]]


class Harm:
    """What is done to the server: one event after the other, again and again."""

    def __init__(self, deployed: Deployed, replicas: Replicas, log: UsageLog) -> None:
        self._deployed = deployed
        self._replicas = replicas
        self._log = log
        self._num_cpus = itertools.cycle((0.39, 0.4))
        self._random = Random(16)

    async def again_and_again(self, num_events: int, interval_s: float) -> None:
        """Do something to the server at regular intervals."""
        events = itertools.cycle((self.kill, self.redeploy, self.scale_down))
        for event in itertools.islice(events, num_events):
            self._log.note(event.__name__.replace("_", " "))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(event())
                tasks.create_task(asyncio.sleep(interval_s))

    async def kill(self) -> None:
        """Kill a replica, and wait for its successor."""
        kill(self._random.choice(self._replicas.alive))
        await self._replicas.complete(NUM_REPLICAS)

    async def redeploy(self) -> None:
        """Replace all replicas by new ones, as a changed file does."""
        before = set(self._replicas.alive)
        num_cpus = next(self._num_cpus)
        section = self._deployed.section(MODEL)
        section["ray_actor_options"] = {"num_cpus": num_cpus, "num_gpus": 0}
        await self._deployed.apply()
        await reached(lambda: not before.intersection(self._replicas.alive))
        await self._replicas.complete(NUM_REPLICAS)
        await self._deployed.settled()

    async def scale_down(self) -> None:
        """Take all replicas but one away, and then bring them back."""
        for num_replicas in (1, NUM_REPLICAS):
            self._deployed.section(MODEL)["num_replicas"] = num_replicas
            await self._deployed.apply()
            await reached(lambda number=num_replicas: len(self._replicas.alive) == number)  # type: ignore[misc] # bound now
            await self._deployed.settled()


async def ask_again_and_again(
    client: httpx.AsyncClient, start: int, harming: asyncio.Task[None]
) -> list[tuple[str, Answer]]:
    """Ask for answers of one kind after the other until the harming has ended."""
    answers = []
    for kind in itertools.islice(itertools.cycle(KINDS), start, None):
        answers.append((kind, await read(client, KINDS[kind])))
        if harming.done():
            return answers
    raise AssertionError("the kinds never end")


async def leave_again_and_again(
    client: httpx.AsyncClient, start: int, harming: asyncio.Task[None]
) -> int:
    """Open streams and leave in mid-answer until the harming has ended; return how many."""
    bodies: list[Body] = list(KINDS.values())
    for number in itertools.count(1):
        async with opened(client, bodies[(start + number) % len(bodies)]) as stream:
            await stream.read_tokens(5)
        if harming.done():
            return number
    raise AssertionError("the numbers never end")


@pytest.mark.soak
@pytest.mark.parametrize(("num_events", "interval_s"), [(3, 8), (15, 60)])
async def test_nothing_is_lost_and_nothing_grows(
    client: httpx.AsyncClient,
    server: Server,
    deployed: Deployed,
    replicas: Replicas,
    folder: Path,
    record: Record,
    num_events: int,
    interval_s: int,
) -> None:
    known = {kind: await read(client, body) for kind, body in KINDS.items()}
    await asyncio.gather(*(read(client, body) for body in KINDS.values()))
    log = UsageLog(server)
    before = usage_of(server)
    sampling = asyncio.create_task(log.sample_for_ever())
    harm = Harm(deployed, replicas, log)
    harming = asyncio.create_task(harm.again_and_again(num_events, interval_s))
    asking = (ask_again_and_again(client, start, harming) for start in range(NUM_CLIENTS))
    leaving = (leave_again_and_again(client, start, harming) for start in range(NUM_LEAVERS))
    left = asyncio.gather(*leaving)
    answers = list(itertools.chain(*await asyncio.gather(*asking)))
    num_left = sum(await left)
    await harming
    await reached(lambda: replicas.are_idle)
    sampling.cancel()
    after = usage_of(server)
    log.write(folder / "memory.json")
    log.plot(folder / "memory.png")
    record("memory over time", folder / "memory.png")
    for kind in sorted(before):
        record(
            f"{kind}: MiB", f"{before[kind].rss_bytes / MIB:.0f}, {after[kind].rss_bytes / MIB:.0f}"
        )
        record(f"{kind}: fds", f"{before[kind].num_fds}, {after[kind].num_fds}")
    moved = [answer for _, answer in answers if answer.lost_at]
    pauses = sorted(answer.longest_gap_s for answer in moved)
    record("events", [event for _, event in log.events])
    record("answers, of which moved; clients that left", (len(answers), len(moved), num_left))
    record("longest pauses of moved answers: p50, p99, longest, s", percentiles(pauses))
    assert_equal([answer for _, answer in answers], [known[kind] for kind, _ in answers])
    assert after["ingress"].rss_bytes - before["ingress"].rss_bytes < MAX_GROWTH_BYTES
    # Each replica grows while it meets its first requests, and none lives through all of this.
    earlier, later = log.largest_in_halves("replicas")
    record("largest replica in the first and the second half, MiB", (earlier // MIB, later // MIB))
    assert later - earlier < MAX_GROWTH_BYTES
    for kind in ("ingress", "replicas"):
        assert after[kind].num_fds - before[kind].num_fds < MAX_MORE_FDS


def percentiles(sizes: list[float]) -> list[float]:
    """Return the median, the 99th percentile and the largest of some sorted numbers."""
    if not sizes:
        return []
    return [round(sizes[int(share * (len(sizes) - 1))], 2) for share in (0.5, 0.99, 1)]
