"""A worker gets SIGTERM while streams run at it and through it, as when its pod is deleted."""

import asyncio
import time

import httpx
import pytest

from tests.faults.served.answer import read
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import DEADLINE_S, reached
from tests.k8s.live.cluster import AS_RENDERED, LocalCluster, PodNode
from tests.k8s.live.conftest import Service
from tests.k8s.live.load import Load
from tests.k8s.live.placement import nodes_of, scaled, until_running
from tests.measured import Record
from tests.prometheus import samples

NUM_CLIENTS = 12
MIN_STREAMS = 3
"""At the worker's replica. The router gives none of two more than 1.25 times its half."""

NUM_NEW = 10
"""Requests that come after the worker has been told to stop."""

# Prompts with beginnings of their own, since the router sends equal ones to one replica; lengths
# of their own, so that streams end one by one.
NAMES = ("os.path.join", "os.walk", "json.dumps", "re.match", "time.sleep", "os.stat", "re.sub")
BODIES = [about(name, **SEEDED, max_tokens=600 + 70 * i) for i, name in enumerate(NAMES)]
QUICK = about("os.path.split", max_tokens=5)


@pytest.fixture
async def leaving(cluster: LocalCluster, deployed: Deployed, client: httpx.AsyncClient) -> PodNode:
    """Give the model a replica on each worker; return a worker with an ingress."""
    await scaled(deployed, "pydoc-chat", 2)
    placed = await nodes_of(deployed)
    workers = {worker.name: worker for worker in cluster.alive}
    assert placed["pydoc-chat"] == workers.keys()
    return workers[min(placed["Ingress"])]


async def test_no_stream_is_lost_when_a_worker_is_told_to_stop(
    client: httpx.AsyncClient,
    deployed: Deployed,
    leaving: PodNode,
    service: Service,
    record: Record,
) -> None:
    await stop_under_load(client, deployed, leaving, service, record)
    # No other worker may take a second replica, so Serve would keep this one for a minute.
    deployed.section("pydoc-chat")["autoscaling_config"] |= {"min_replicas": 1, "max_replicas": 1}
    await deployed.apply()
    ended_s = await reached(lambda: not leaving.is_alive)
    record("seconds until the worker had ended", round(ended_s, 1))
    placed = await nodes_of(deployed)
    assert leaving.name not in set().union(*placed.values())


@pytest.mark.soak  # Serve waits for a minute; then a new worker starts
@pytest.mark.parametrize("_cluster", [AS_RENDERED], indirect=True, ids=["as rendered"])
async def test_a_worker_ends_within_its_grace_period_and_another_takes_its_place(
    cluster: LocalCluster,
    client: httpx.AsyncClient,
    deployed: Deployed,
    leaving: PodNode,
    service: Service,
    record: Record,
) -> None:
    asked_s = time.monotonic()
    await stop_under_load(client, deployed, leaving, service, record)
    (grace_s,) = {each.grace_s for each in cluster.worker_pods}
    await reached(lambda: not leaving.is_alive, grace_s)
    record("seconds until the worker had ended", since(asked_s))
    assert len((await deployed.running_replicas())["pydoc-chat"]) == 1
    cluster.complete()
    await until_running(deployed, "pydoc-chat", 2)
    assert (await nodes_of(deployed))["pydoc-chat"] == {each.name for each in cluster.alive}


async def stop_under_load(
    client: httpx.AsyncClient,
    deployed: Deployed,
    leaving: PodNode,
    service: Service,
    record: Record,
) -> None:
    """Tell a worker to stop while streams run at it and through it; all of them are equal."""
    replicas = (await deployed.running_replicas())["pydoc-chat"]
    (replica,) = (e["replica_id"] for e in replicas if e["node_instance_id"] == leaving.name)
    load = Load(client, BODIES, NUM_CLIENTS)
    async with load.running():
        num_there = await until_it_runs(client, replica, at_least=MIN_STREAMS)
        record("streams, and those at the worker's replica", (len(load.open), num_there))
        await reached(lambda: enters_through(load, leaving) and enters_elsewhere(load, leaving))
        asked_s = time.monotonic()
        service.ports.remove(leaving.http_port)  # Kubernetes waits for that in `preStop`
        leaving.terminate()
        asking = asyncio.create_task(waits_of_new_requests(client))
        await reached(lambda: any(each.lost_at for each in (*load.open, *load.answers)))
        # They move because the node stops. Serve ends the replica later, which would move them too.
        assert (await chat_states(deployed)).get(replica) in ("RUNNING", "PENDING_MIGRATION")
        await until_it_runs(client, replica, at_most=0)
        record("seconds from SIGTERM until no stream ran at its replica", since(asked_s))
        waits_s = await asking
    load.check(record)
    moved_s = sorted(round(at - asked_s, 2) for each in load.answers for at in each.moved_at_s)
    record("seconds from SIGTERM until moved", moved_s)
    record("longest wait of the new requests one after the other, s", round(max(waits_s), 1))


async def chat_states(deployed: Deployed) -> dict[str, str]:
    """Return what Serve says about each replica of the chat model, by its id."""
    replicas = (await deployed.details())["deployments"]["pydoc-chat"]["replicas"]
    return {each["replica_id"]: each["state"] for each in replicas}


def enters_through(load: Load, worker: PodNode) -> bool:
    """Whether a stream runs that entered through a worker's port."""
    return any(each.server[1] == worker.http_port for each in load.open)


def enters_elsewhere(load: Load, worker: PodNode) -> bool:
    """Whether a stream runs that entered through another port."""
    return any(each.server[1] != worker.http_port for each in load.open)


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
                if (each.name, each.labels.get("replica")) == ("vllm:num_requests_running", replica)
            )
            if at_least <= num <= at_most:
                return num
            await asyncio.sleep(0.1)  # a text is made once a second


async def waits_of_new_requests(client: httpx.AsyncClient) -> list[float]:
    """Ask for short answers, one after the other; return the seconds that each took."""
    waits_s = []
    for _ in range(NUM_NEW):
        began_s = time.monotonic()
        assert (await read(client, QUICK)).is_whole
        waits_s.append(time.monotonic() - began_s)
    return waits_s


def since(started_s: float) -> float:
    """Return the seconds since then."""
    return round(time.monotonic() - started_s, 1)
