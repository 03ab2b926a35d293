"""One of two ingresses behind HAProxy is killed: only the streams that came through it break.

Clients that can resume their streams do so through the other. Serve needs seconds to start another
ingress, so the suite kills more of them in `tests/faults/test_killed_ingresses.py`.
"""

import asyncio
from random import Random

import httpx
import pytest

from tests.faults.resuming_client import ResumingClient, essence
from tests.faults.served.answer import Answer, assert_equal, read, slow_streams
from tests.faults.served.ingresses import Ingresses
from tests.faults.served.kinds import KINDS, SEEDED, about
from tests.faults.served.replicas import DEADLINE_S, Replicas, is_alive, kill, reached
from tests.measured import Record
from tests.ray.serve_run import Server

NUM_STREAMS = 12
NUM_REQUESTS = 20
BODIES = [about("os.path.join", **SEEDED | {"seed": i}, max_tokens=300) for i in range(NUM_STREAMS)]
QUICK = about("os.stat", max_tokens=5)
RESUMED = ("greedy", "seeded", "several", "tools")
NUM_OF_EACH = 2


async def asked(client: httpx.AsyncClient) -> Answer | httpx.TransportError:
    """Return the answer to a quick request, or the error that its client sees."""
    try:
        return await read(client, QUICK)
    except httpx.TransportError as error:
        return error


async def test_streams_of_the_other_ingress_go_on_and_clients_resume_or_ask_there(
    client: httpx.AsyncClient,
    server: Server,
    replicas: Replicas,
    two_ingresses: list[int],
    record: Record,
) -> None:
    expected = list(await asyncio.gather(*(read(client, body) for body in BODIES)))
    resumable = {name: essence(await read(client, KINDS[name])) for name in RESUMED}
    assert len(two_ingresses) == 2
    names = RESUMED * NUM_OF_EACH
    readers = [ResumingClient(client, KINDS[name], lambda: server.url) for name in names]
    async with slow_streams(client, BODIES, "in") as streams:
        reading = [asyncio.create_task(each.outcome()) for each in streams]
        resuming = asyncio.gather(*(reader.read() for reader in readers))
        await asyncio.gather(*(reader.wait_for(20) for reader in readers))
        kill(two_ingresses[0])
        quick = [await asked(client) for _ in range(NUM_REQUESTS)]
        outcomes = await asyncio.gather(*reading)
        resumed = await resuming
    assert not is_alive(two_ingresses[0])
    # HAProxy sends a few requests to the dead ingress before it knows. It refuses them, or resets
    # one that went over a connection which it had used before.
    assert isinstance(quick[-1], Answer)
    assert quick[-1].is_whole
    answers = [found for found in quick if isinstance(found, Answer)]
    assert not any(answer.num_done for answer in answers if not answer.is_whole)
    refused = [answer.status for answer in answers if not answer.is_whole]
    record("new requests that were refused, by status", refused)
    record("new requests that were reset", NUM_REQUESTS - len(answers))
    whole = {i: found for i, found in enumerate(outcomes) if isinstance(found, Answer)}
    assert 0 < len(whole) < NUM_STREAMS
    assert_equal(list(whole.values()), [expected[i] for i in whole])
    assert not any(answer.comments for answer in whole.values())
    record("streams that were reset", NUM_STREAMS - len(whole))
    record("streams that went on, undisturbed", len(whole))
    for name, answer in zip(names, resumed, strict=True):
        assert essence(answer) == resumable[name], name
    num_resumed = sum(reader.num_resumed > 0 for reader in readers)
    assert num_resumed
    record("answers that were resumed", num_resumed)


@pytest.mark.soak
async def test_streams_of_200_killed_ingresses_are_resumed_and_equal(
    client: httpx.AsyncClient,
    server: Server,
    replicas: Replicas,
    ingresses: Ingresses,
    two_ingresses: list[int],
    record: Record,
) -> None:
    num_kills = 200
    random = Random(num_kills)
    expected = {name: essence(await read(client, KINDS[name])) for name in RESUMED}
    num_resumed = num_answers = 0
    for _ in range(num_kills):
        await reached(lambda: len(ingresses.processes()) == 2)
        names = RESUMED * NUM_OF_EACH
        readers = [ResumingClient(client, KINDS[name], lambda: server.url) for name in names]
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        async with asyncio.timeout(DEADLINE_S):
            await random.choice(readers).wait_for(random.randrange(1, 400))
            victim = random.choice(ingresses.processes())
            kill(victim)
            answers = await asyncio.gather(*reading)
        assert not is_alive(victim)
        for name, answer in zip(names, answers, strict=True):
            assert essence(answer) == expected[name], name
        num_answers += len(answers)
        num_resumed += sum(reader.num_resumed > 0 for reader in readers)
    record("answers, of which resumed", (num_answers, num_resumed))
    assert num_resumed
