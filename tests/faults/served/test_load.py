"""Closed-loop load while replicas are killed again and again; test_deaths.py is the short twin."""

import asyncio
import itertools
from random import Random

import httpx
import pytest

from tests.faults.served.answer import Answer, assert_equal, read
from tests.faults.served.kinds import SEEDED, Body, about
from tests.faults.served.replicas import Replicas, kill
from tests.measured import Record

NUM_CLIENTS = 8
KILL_INTERVAL_S = 5
NAMES = ("os.path.join", "os.stat", "json.dumps", "re.match", "os.walk", "time.sleep")
BODIES: tuple[Body, ...] = tuple(
    about(name, max_tokens=300, **sampling) for name in NAMES for sampling in ({}, SEEDED)
)


async def kill_again_and_again(replicas: Replicas, duration_s: float) -> int:
    """Kill one of the living replicas at regular intervals; return how many died.

    It goes on for longer if fewer than half of the intervals found one alive: replicas start slowly
    on a busy machine.
    """
    num_kills, random = 0, Random(15)
    num_intervals = int(duration_s / KILL_INTERVAL_S)
    for interval in itertools.count():
        if interval >= num_intervals and num_kills >= num_intervals / 2:
            break
        await asyncio.sleep(KILL_INTERVAL_S)
        if alive := replicas.alive:
            kill(random.choice(alive))
            num_kills += 1
    return num_kills


async def ask_again_and_again(
    client: httpx.AsyncClient, start: int, killing: asyncio.Task[int]
) -> list[tuple[Body, Answer]]:
    """Ask one question after the other until the killing has ended."""
    answers = []
    for body in itertools.islice(itertools.cycle(BODIES), start, None):
        answers.append((body, await read(client, body)))
        if killing.done():
            return answers
    raise AssertionError("the bodies never end")


@pytest.mark.soak
@pytest.mark.parametrize("duration_s", [15, 60])
async def test_no_request_fails_and_no_token_is_lost_or_doubled(
    client: httpx.AsyncClient, replicas: Replicas, record: Record, duration_s: int
) -> None:
    known = {str(body): await read(client, body) for body in BODIES}
    killing = asyncio.create_task(kill_again_and_again(replicas, duration_s))
    loops = (ask_again_and_again(client, start, killing) for start in range(NUM_CLIENTS))
    answers = list(itertools.chain(*await asyncio.gather(*loops)))
    assert_equal([answer for _, answer in answers], [known[str(body)] for body, _ in answers])
    moved = [answer for _, answer in answers if answer.lost_at]
    assert moved
    record("replicas killed", killing.result())
    record("requests", len(answers))
    record("streams moved", len(moved))
    record("longest pause, s", round(max(answer.longest_gap_s for answer in moved), 2))
