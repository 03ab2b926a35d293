"""One of two ingresses is killed: only the streams that came through it break, and visibly."""

import asyncio

import httpx

from tests.faults.served.answer import Answer, Stream, assert_equal, read, slow_streams
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.replicas import Replicas, is_alive, kill
from tests.measured import Record

NUM_STREAMS = 12
NUM_REQUESTS = 20
BODIES = [about("os.path.join", **SEEDED | {"seed": i}, max_tokens=400) for i in range(NUM_STREAMS)]
QUICK = about("os.stat", max_tokens=5)


async def outcome_of(stream: Stream) -> Answer | httpx.TransportError:
    """Return a stream's whole answer, or the error that its client sees."""
    try:
        return await stream.read_to_end()
    except httpx.TransportError as error:
        assert (stream.answer.num_done, stream.answer.error) == (0, None)
        return error


async def test_streams_of_the_other_ingress_go_on_and_new_requests_find_it(
    client: httpx.AsyncClient,
    replicas: Replicas,
    two_ingresses: list[int],
    record: Record,
) -> None:
    expected = list(await asyncio.gather(*(read(client, body) for body in BODIES)))
    assert len(two_ingresses) == 2
    async with slow_streams(client, BODIES, "in") as streams:
        reading = [asyncio.create_task(outcome_of(each)) for each in streams]
        kill(two_ingresses[0])
        quick = [await read(client, QUICK) for _ in range(NUM_REQUESTS)]
        outcomes = await asyncio.gather(*reading)
    assert not is_alive(two_ingresses[0])
    # HAProxy sends a few requests to the dead ingress before it knows.
    assert quick[-1].is_whole
    assert not any(answer.num_done for answer in quick if not answer.is_whole)
    refused = [answer.status for answer in quick if not answer.is_whole]
    record("new requests that were refused, by status", refused)
    whole = {i: found for i, found in enumerate(outcomes) if isinstance(found, Answer)}
    assert 0 < len(whole) < NUM_STREAMS
    assert_equal(list(whole.values()), [expected[i] for i in whole])
    assert not any(answer.comments for answer in whole.values())
    record("streams that were reset", NUM_STREAMS - len(whole))
    record("streams that went on, undisturbed", len(whole))
