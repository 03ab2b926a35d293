"""A machine that is paused, as by a snapshot of its virtual machine: each process stands still."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import psutil
import pytest

from tests.faults.served.answer import assert_equal, read, slow_streams
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.replicas import Replicas
from tests.measured import Record
from tests.ray.serve_run import Server

BODIES = [about("os.path.join", **SEEDED | {"seed": seed}, max_tokens=300) for seed in range(8)]


@contextmanager
def standing_still(server: Server) -> Iterator[None]:
    """Stop all processes of a server, its own first, which would take it for their end."""
    root = psutil.Process(server.process.pid)
    stopped = [root, *root.children(recursive=True)]
    try:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        yield
    finally:
        for process in reversed(stopped):
            with suppress(psutil.NoSuchProcess):
                process.resume()


@pytest.mark.parametrize("pause_s", [9, pytest.param(40, marks=pytest.mark.soak)])
async def test_streams_go_on_at_their_replicas_after_a_pause_of_the_machine(
    client: httpx.AsyncClient,
    replicas: Replicas,
    server: Server,
    record: Record,
    pause_s: float,
) -> None:
    expected = await asyncio.gather(*(read(client, body) for body in BODIES))
    before = replicas.alive
    async with slow_streams(client, BODIES, f"pause-{pause_s}") as streams:
        await streams[0].read_tokens(20)
        with standing_still(server):
            await asyncio.sleep(pause_s)
        answers = await asyncio.gather(*(stream.read_to_end() for stream in streams))
    assert_equal(answers, expected)
    assert replicas.alive == before
    record("streams that moved", sum("moved" in answer.comments for answer in answers))
    record("longest pause, s", round(max(answer.longest_gap_s for answer in answers), 2))
