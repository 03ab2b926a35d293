"""A replica that stops without dying, and one that then comes back."""

import asyncio
import os
import signal

import httpx
import pytest

from tests.faults.served.answer import assert_equal, read, slow_streams
from tests.faults.served.devices import shown
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.replicas import DEADLINE_S, Replicas, is_alive, reached
from tests.faults.served.sizes import NUM_REPLICAS
from tests.measured import Record

BODIES = [about("os.path.join", **SEEDED | {"seed": seed}, max_tokens=300) for seed in range(8)]


@pytest.mark.parametrize(
    "comes_back",
    [
        pytest.param(True, id="comes back"),
        # Serve needs half a minute to replace it.
        pytest.param(False, id="never returns", marks=pytest.mark.soak),
    ],
)
async def test_streams_of_a_replica_that_hangs_are_equal_and_devices_call_it_silent(
    client: httpx.AsyncClient, replicas: Replicas, record: Record, comes_back: bool
) -> None:
    expected = await asyncio.gather(*(read(client, body) for body in BODIES))
    async with slow_streams(client, BODIES, f"hang-{comes_back}") as streams:
        await streams[0].read_tokens(20)
        (victim,) = replicas.runs_of(streams[0].answer.request_id)
        os.kill(victim, signal.SIGSTOP)
        try:
            await until_silent(client, victim, replicas)
            await streams[0].read_comment("moved")
        finally:
            if comes_back:
                _continue(victim)
        answers = await asyncio.gather(*(stream.read_to_end() for stream in streams))
    assert_equal(answers, expected)
    # One that comes back notices that its streams have moved; Serve finds the other.
    await reached(lambda: not is_alive(victim))
    await replicas.complete(NUM_REPLICAS)
    record("longest pause, s", round(max(answer.longest_gap_s for answer in answers), 2))


async def until_silent(client: httpx.AsyncClient, stopped: int, replicas: Replicas) -> None:
    """Wait until `/v1/devices` names the replica that is stopped, and shows only the other."""
    before = replicas.alive
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = await shown(client)
            if found.processes and stopped not in found.processes:
                break
    assert set(found.processes) == set(before) - {stopped}
    assert len(found.model["silent_replicas"]) == 1


def _continue(process_id: int) -> None:
    """Let a process go on, unless Serve has ended it."""
    if is_alive(process_id):
        os.kill(process_id, signal.SIGCONT)
