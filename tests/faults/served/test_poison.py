"""A request that kills whatever runs it, beside clients that stay, leave and vanish."""

import asyncio
import socket
from contextlib import AsyncExitStack
from uuid import uuid4

import httpx
import pytest

from tests.faults.served.answer import Answer, assert_equal, opened, read
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.leavers import asked, leave_after, vanish
from tests.faults.served.replicas import Replicas, is_alive, reached
from tests.faults.served.sizes import NUM_REPLICAS
from tests.measured import Record
from tests.ray.serve_run import Server

NEIGHBOURS = [about("os.stat", **SEEDED | {"seed": seed}, max_tokens=900) for seed in range(6)]
POISON = about("os.path.join")
WAYS = {"kill-encoding": 2, "kill-at-1": 2, "kill-at-40": 3}
"""When the request kills, and how many replicas: a text that has begun is suspected later."""

NUM_EARLY_TOKENS = 5
LEAVERS = (0, NUM_EARLY_TOKENS, 400)
"""After how many tokens they leave; by the last, replicas have died."""


@pytest.mark.parametrize(
    ("way", "num_killed"),
    [
        pytest.param(*pair, marks=() if pair[0] == "kill-encoding" else pytest.mark.soak)
        for pair in WAYS.items()
    ],
    ids=WAYS,
)
async def test_only_the_request_that_kills_fails_and_clients_that_leave_free_their_places(
    client: httpx.AsyncClient,
    server: Server,
    replicas: Replicas,
    record: Record,
    way: str,
    num_killed: int,
) -> None:
    expected = await asyncio.gather(*(read(client, body) for body in NEIGHBOURS))
    before = replicas.alive
    assert len(before) == NUM_REPLICAS
    name, vanishing = f"{way}-{uuid4().hex[:8]}", f"vanishes-{uuid4().hex[:8]}"
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(opened(client, body)) for body in NEIGHBOURS]
        connection = asked(server.port, vanishing)
        stack.callback(connection.close)
        await reached(lambda: len(replicas.runs_of(vanishing)) == 2)
        leaving = asyncio.gather(*(leave_after(client, each) for each in LEAVERS))
        for stream in streams:
            await stream.read_tokens(NUM_EARLY_TOKENS)
        poison = asyncio.create_task(read(client, POISON, request_id=name))
        await reached(lambda: len(replicas.runs_of(vanishing)) > 2)
        record("how the client left", leave_silently(connection))
        check_failed(await poison)
        await leaving
        answers = await asyncio.gather(*(stream.read_to_end() for stream in streams))
    assert_equal(answers, expected)
    ran = set(replicas.runs_of(name))
    killed = [process_id for process_id in ran if not is_alive(process_id)]
    await replicas.complete(NUM_REPLICAS)
    assert len(killed) == len(ran) == num_killed
    record("replicas killed", len(killed))
    record("longest pause of a neighbour, s", round(max(a.longest_gap_s for a in answers), 2))
    await reached(lambda: replicas.are_idle)


def leave_silently(connection: socket.socket) -> str:
    """Vanish, or close the connection where only a privileged process may vanish."""
    try:
        vanish(connection)
    except PermissionError:
        connection.close()
        return "it closed its connection: vanishing needs CAP_NET_ADMIN"
    return "it vanished"


def check_failed(poison: Answer) -> None:
    """Fail unless an answer is the error of a request that was taken for the cause."""
    assert not poison.is_whole
    assert poison.num_done == 0
    code = "generation_failed"
    assert code in poison.body if poison.error is None else poison.error["code"] == code
    assert poison.status in (200, 500)
