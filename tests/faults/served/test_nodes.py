"""A node is told to stop, or is lost: streams of its replicas go on at the other node.

Both nodes are on this machine. In plain mode their proxies share one port, and the kernel gives
each connection to either; a proxy prefers the ingress of its own node. With HAProxy each node has
its own port, the client asks them in turn, and each HAProxy knows the ingresses of both nodes.
tests/k8s/live/test_worker_stop.py is the short twin of a node that is told to stop; test_ingress.py
and test_deaths.py kill what a lost node holds.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import cycle
from uuid import uuid4

import httpx
import pytest

from tests.faults.served.answer import Answer, Stream, assert_equal, read, slow_streams
from tests.faults.served.conftest import config
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.nodes import Cluster, Node
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import DEADLINE_S, Replicas, reached
from tests.measured import Record

NUM_STREAMS = 12
BODIES = [about("os.path.join", **SEEDED | {"seed": i}, max_tokens=900) for i in range(NUM_STREAMS)]
QUICK = about("os.stat", max_tokens=5)

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "haproxy"])
def cluster(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("nodes")
    Replicas.watched_in(folder)
    cluster = Cluster(folder, has_haproxy=request.param)
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
async def worker(cluster: Cluster) -> AsyncIterator[Node]:
    node = cluster.add_worker()
    try:
        yield node
    finally:
        node.kill()


@pytest.fixture
async def deployed(cluster: Cluster, worker: Node) -> Deployed:
    """Deploy the application over both nodes: each gets a proxy, an ingress and a replica."""
    document = config()
    document["http_options"]["port"] = cluster.head.http_port
    application = document["applications"][0]
    application["args"]["auth"]["allow_unauthenticated_ray"] = True
    for section in application["deployments"]:
        section["num_replicas"] = 2
    deployed = Deployed(f"http://127.0.0.1:{cluster.dashboard_port}", document)
    await deployed.reachable(num_nodes=2)
    await deployed.remove()  # an earlier test's, so that Serve spreads all replicas anew
    await deployed.apply()
    await deployed.settled()
    return deployed


@pytest.fixture
async def client(
    cluster: Cluster, worker: Node, deployed: Deployed
) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client that sends its requests to both nodes in turn, where their ports differ."""
    ports = cycle([worker.http_port, cluster.head.http_port])

    async def send_to_the_next(request: httpx.Request) -> None:
        request.url = request.url.copy_with(port=next(ports))

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url="http://127.0.0.1",
        timeout=DEADLINE_S,
        limits=limits,
        event_hooks={"request": [send_to_the_next]},
    ) as client:
        for node in (worker, cluster.head):
            await listening(node)
        yield client


@pytest.fixture
def replicas(cluster: Cluster) -> Replicas:
    return Replicas(cluster.folder)


async def undisturbed(client: httpx.AsyncClient) -> list[Answer]:
    return list(await asyncio.gather(*(read(client, body) for body in BODIES)))


def require_spread(node: Node, replicas: Replicas) -> None:
    """Fail unless one ingress and one replica run on the node, and others elsewhere."""
    ids = node.process_ids()
    assert 0 < len(ids & set(replicas.alive)) < len(replicas.alive)
    titles = [" ".join(each.cmdline()) for each in node.processes() if each.is_running()]
    assert sum("Ingress" in title for title in titles) == 1


async def test_a_node_that_is_told_to_stop_loses_nothing(
    client: httpx.AsyncClient, worker: Node, replicas: Replicas, record: Record
) -> None:
    require_spread(worker, replicas)
    expected = await undisturbed(client)
    name = uuid4().hex
    async with slow_streams(client, BODIES, name, "held") as streams:
        on_worker = [s for s in streams if runs_on(worker, s.answer, replicas)]
        assert 0 < len(on_worker) < NUM_STREAMS
        ids_on_worker = [each.answer.request_id for each in on_worker]
        entered = [s for s in streams if worker.has_connection(s.answer.client)]
        assert 0 < len(entered) < NUM_STREAMS
        record("streams that entered through the node", len(entered))
        asked_s = time.monotonic()
        worker.terminate()
        reading = [asyncio.create_task(each.read_to_end()) for each in streams]
        quick = [await read(client, QUICK) for _ in range(20)]
        await reached(lambda: all(len(replicas.runs_of(each)) > 1 for each in ids_on_worker))
        replicas.release(name)
        answers = await asyncio.gather(*reading)
    assert_equal(answers, expected)
    assert all(answer.is_whole for answer in quick)
    assert all(stream.answer.lost_at for stream in on_worker)
    moved_s = sorted(round(at - asked_s, 2) for each in answers for at in each.moved_at_s)
    record("seconds from SIGTERM until moved", moved_s)
    record("longest pause, s", round(max(each.longest_gap_s for each in answers), 2))
    ended_s = await reached(lambda: worker.process.poll() is not None)
    record("seconds from the last stream's end until the node had ended", round(ended_s, 1))


async def test_a_node_that_is_lost_breaks_only_what_came_through_it(
    client: httpx.AsyncClient, worker: Node, replicas: Replicas, record: Record
) -> None:
    require_spread(worker, replicas)
    expected = await undisturbed(client)
    async with slow_streams(client, BODIES, uuid4().hex) as streams:
        on_worker = [s for s in streams if runs_on(worker, s.answer, replicas)]
        assert 0 < len(on_worker) < NUM_STREAMS
        reading = [asyncio.create_task(outcome_of(each)) for each in streams]
        worker.kill()
        killed_s = time.monotonic()
        await answered(client)
        record("seconds until a new request was answered", round(time.monotonic() - killed_s, 1))
        await asyncio.gather(*reading)
    whole = {i: s.answer for i, s in enumerate(streams) if s.answer.num_done}
    assert_equal(list(whole.values()), [expected[i] for i in whole])
    assert 0 < len(whole) < NUM_STREAMS
    moved = [answer for answer in whole.values() if runs_on(worker, answer, replicas)]
    assert all(answer.lost_at for answer in moved)
    record("streams that were reset", NUM_STREAMS - len(whole))
    record("streams that moved", len(moved))
    record("longest pause, s", round(max(each.longest_gap_s for each in whole.values()), 2))


def runs_on(node: Node, answer: Answer, replicas: Replicas) -> bool:
    return replicas.runs_of(answer.request_id)[0] in node.process_ids()


async def listening(node: Node) -> None:
    """Wait until the node's proxy takes connections."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(ConnectionRefusedError):
                _, writer = await asyncio.open_connection("127.0.0.1", node.http_port)
                writer.close()
                return await writer.wait_closed()
            await asyncio.sleep(0.1)


async def outcome_of(stream: Stream) -> None:
    """Read a stream until it ends or is reset."""
    with suppress(httpx.TransportError):
        await stream.read_to_end()


async def answered(client: httpx.AsyncClient) -> None:
    """Ask until a new request is answered."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(httpx.TransportError, AssertionError):
                if (await read(client, QUICK)).is_whole:
                    return
