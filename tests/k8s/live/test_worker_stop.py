"""A worker gets SIGTERM while streams run at it and through it, as when its pod is deleted."""

import asyncio
import time
from contextlib import AsyncExitStack

import httpx
import pytest

from tests.faults.served.answer import Answer, assert_equal, opened, read
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import reached
from tests.k8s.live.cluster import LocalCluster, PodNode
from tests.k8s.live.conftest import Service
from tests.k8s.live.placement import nodes_of, scaled
from tests.measured import Record

NUM_STREAMS = 12
BODIES = [about("os.path.join", **SEEDED | {"seed": i}, max_tokens=900) for i in range(NUM_STREAMS)]
QUICK = about("os.stat", max_tokens=5)


@pytest.fixture
async def leaving(cluster: LocalCluster, deployed: Deployed, client: httpx.AsyncClient) -> PodNode:
    """Give the model a replica on each worker; return the worker with the only ingress."""
    await scaled(deployed, "pydoc-chat", 2)
    placed = await nodes_of(deployed)
    workers = {worker.name: worker for worker in cluster.alive}
    assert placed["pydoc-chat"] == workers.keys()
    (name,) = placed["Ingress"]
    return workers[name]


async def undisturbed(client: httpx.AsyncClient) -> list[Answer]:
    return list(await asyncio.gather(*(read(client, body) for body in BODIES)))


@pytest.mark.soak  # tests/faults/served/test_nodes.py is its short twin
async def test_no_stream_is_lost_when_a_worker_is_told_to_stop(
    cluster: LocalCluster,
    client: httpx.AsyncClient,
    leaving: PodNode,
    service: Service,
    record: Record,
) -> None:
    expected = await undisturbed(client)
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(opened(client, body)) for body in BODIES]
        await asyncio.gather(*(stream.read_tokens(1) for stream in streams))
        entered = [s for s in streams if leaving.has_connection(s.answer.client)]
        assert 0 < len(entered) < NUM_STREAMS
        asked_s = time.monotonic()
        service.ports.remove(leaving.http_port)  # Kubernetes waits for that in `preStop`
        leaving.terminate()
        reading = [asyncio.create_task(stream.read_to_end()) for stream in streams]
        quick, waits_s = [], []
        for _ in range(20):
            began_s = time.monotonic()
            quick.append(await read(client, QUICK))
            waits_s.append(time.monotonic() - began_s)
        answers = await asyncio.gather(*reading)
        record("seconds from SIGTERM until the last stream's end", since(asked_s))
    assert_equal(answers, expected)
    assert all(answer.is_whole for answer in quick)
    moved_s = sorted(round(at - asked_s, 2) for each in answers for at in each.moved_at_s)
    assert moved_s
    record("streams, all whole and equal", len(answers))
    record("streams that entered through the worker", len(entered))
    record("seconds from SIGTERM until moved", moved_s)
    record("longest pause, s", round(max(each.longest_gap_s for each in answers), 2))
    (grace_s,) = {each.grace_s for each in cluster.worker_pods}
    await reached(lambda: not leaving.is_alive, grace_s)
    record("seconds from SIGTERM until the worker had ended", since(asked_s))
    record("longest wait of 20 new requests one after the other, s", round(max(waits_s), 1))


def since(started_s: float) -> float:
    """Return the seconds since then."""
    return round(time.monotonic() - started_s, 1)
