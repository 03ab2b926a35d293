"""A worker gets SIGTERM while streams run at it and through it, as when its pod is deleted."""

import asyncio
import time

import httpx
import pytest

from k8s.make_base import DRAIN_S, STREAMS_S
from tests.faults.served.answer import read
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import DEADLINE_S, reached
from tests.k8s.live.cluster import LocalCluster, PodNode
from tests.k8s.live.conftest import Service
from tests.k8s.live.load import Load
from tests.k8s.live.placement import nodes_of, scaled, until_running
from tests.measured import Record
from tests.prometheus import samples

NUM_CLIENTS = 12
MIN_STREAMS = 3
"""At the worker's replica. The router gives none of two more than 1.25 times its half."""

# Prompts with beginnings of their own, since the router sends equal ones to one replica; lengths
# of their own, so that streams end one by one.
NAMES = ("os.path.join", "os.walk", "json.dumps", "re.match", "time.sleep", "os.stat", "re.sub")
BODIES = [about(name, **SEEDED, max_tokens=600 + 70 * i) for i, name in enumerate(NAMES)]
QUICK = about("os.path.split", max_tokens=5)


@pytest.fixture
async def leaving(cluster: LocalCluster, deployed: Deployed, client: httpx.AsyncClient) -> PodNode:
    """Give the model a replica on each worker; return the worker with the only ingress."""
    await scaled(deployed, "pydoc-chat", 2)
    placed = await nodes_of(deployed)
    workers = {worker.name: worker for worker in cluster.alive}
    assert placed["pydoc-chat"] == workers.keys()
    (name,) = placed["Ingress"]
    return workers[name]


@pytest.mark.soak  # tests/faults/served/test_nodes.py is its short twin
async def test_no_stream_is_lost_when_a_worker_is_told_to_stop(
    cluster: LocalCluster,
    deployed: Deployed,
    client: httpx.AsyncClient,
    leaving: PodNode,
    service: Service,
    record: Record,
) -> None:
    replicas = (await deployed.running_replicas())["pydoc-chat"]
    (replica,) = (e["replica_id"] for e in replicas if e["node_instance_id"] == leaving.name)
    load = Load(client, BODIES, NUM_CLIENTS)
    async with load.running():
        num_there = await until_it_runs(client, replica, at_least=MIN_STREAMS)
        record("streams, and those at the worker's replica", (len(load.open), num_there))
        num_entered = sum(each.server[1] == leaving.http_port for each in load.open)
        assert 0 < num_entered < NUM_CLIENTS
        record("streams that entered through the worker", num_entered)
        asked_s = time.monotonic()
        service.ports.remove(leaving.http_port)  # Kubernetes waits for that in `preStop`
        leaving.terminate()
        asking = asyncio.create_task(waits_of_new_requests(client))
        await until_it_runs(client, replica, at_most=0)
        record("seconds from SIGTERM until no stream ran at its replica", since(asked_s))
        waits_s = await asking
    load.check(record)
    moved_s = sorted(round(at - asked_s, 2) for each in load.answers for at in each.moved_at_s)
    assert len(moved_s) >= MIN_STREAMS
    record("seconds from SIGTERM until moved", moved_s)
    # Serve stops the replica then, and a stream that is still there moves for that reason.
    assert moved_s[-1] < DRAIN_S - STREAMS_S
    (grace_s,) = {each.grace_s for each in cluster.worker_pods}
    await reached(lambda: not leaving.is_alive, grace_s)
    record("seconds from SIGTERM until the worker had ended", since(asked_s))
    record("longest wait of 20 new requests one after the other, s", round(max(waits_s), 1))
    assert len((await deployed.running_replicas())["pydoc-chat"]) == 1
    cluster.complete()
    await until_running(deployed, "pydoc-chat", 2)
    assert (await nodes_of(deployed))["pydoc-chat"] == {each.name for each in cluster.alive}


async def until_it_runs(
    client: httpx.AsyncClient, replica: str, at_least: int = 0, at_most: int = NUM_CLIENTS
) -> int:
    """Wait until the server's metrics show such a number of streams at a replica; return it."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = samples((await client.get("/metrics")).text)
            num = sum(
                int(each.value)
                for each in found
                if (each.name, each.labels["replica"]) == ("vllm:num_requests_running", replica)
            )
            if at_least <= num <= at_most:
                return num
            await asyncio.sleep(0.1)  # a text is made once a second


async def waits_of_new_requests(client: httpx.AsyncClient) -> list[float]:
    """Ask for short answers, one after the other; return the seconds that each took."""
    waits_s = []
    for _ in range(20):
        began_s = time.monotonic()
        assert (await read(client, QUICK)).is_whole
        waits_s.append(time.monotonic() - began_s)
    return waits_s


def since(started_s: float) -> float:
    """Return the seconds since then."""
    return round(time.monotonic() - started_s, 1)
