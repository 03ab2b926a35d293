from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import DEADLINE_S
from tests.k8s.live.cluster import (
    API_KEY,
    LOCALHOST,
    WITHOUT_LOAD_BALANCER,
    LocalCluster,
    local_cluster,
)
from tests.k8s.live.placement import nodes_of
from tests.k8s.live.probes import ready
from tests.k8s.manifests import ROOT

CPU = ROOT / "k8s" / "overlays" / "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if item.path.is_relative_to(here) and "cluster" in fixtures:
            for mark in (pytest.mark.ray, pytest.mark.slow, pytest.mark.kubectl):
                item.add_marker(mark)


@pytest.fixture(scope="package")
def _cluster(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[LocalCluster]:
    environment = getattr(request, "param", WITHOUT_LOAD_BALANCER)
    with local_cluster(tmp_path_factory.mktemp("pods"), CPU, environment) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def _deployed(_cluster: LocalCluster) -> Deployed:
    url = f"http://{LOCALHOST}:{_cluster.dashboard_port}"
    return Deployed(url, _cluster.serve_config(), _cluster.token)


@pytest.fixture
async def cluster(_cluster: LocalCluster) -> LocalCluster:
    """Return the cluster with all its workers."""
    _cluster.complete()
    return _cluster


@pytest.fixture
async def deployed(cluster: LocalCluster, _deployed: Deployed) -> Deployed:
    """Deploy the rendered configuration, as the operator does; what a test changes of it stays."""
    await _deployed.reachable(num_nodes=1 + len(cluster.worker_pods))
    cluster.times_s.setdefault("until all nodes had joined", cluster.age_s)
    await _deployed.apply()
    await _deployed.settled()
    cluster.times_s.setdefault("until the application ran", cluster.age_s)
    return _deployed


class Service:
    """The workers' ports that new connections go to, in turn: a Kubernetes Service in short."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self._turns = count()

    async def send_to_the_next(self, request: httpx.Request) -> None:
        """Give a request the next port."""
        port = self.ports[next(self._turns) % len(self.ports)]
        request.url = request.url.copy_with(port=port)


@pytest.fixture
def service() -> Service:
    """Return the ports of the workers that are ready; `client` fills them in."""
    return Service([])


@pytest.fixture
async def client(
    cluster: LocalCluster, deployed: Deployed, service: Service
) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client with a key, which opens a connection for each request."""
    # Serve starts a proxy only where a replica runs; other workers stay unready, without traffic.
    placed = set[str]().union(*(await nodes_of(deployed)).values())
    workers = [worker for worker in cluster.alive if worker.name in placed]
    for worker in workers:
        await ready(worker)
    service.ports = [worker.http_port for worker in workers]
    async with httpx.AsyncClient(
        base_url=f"http://{LOCALHOST}",
        headers={"Authorization": f"Bearer {API_KEY}"},
        timeout=DEADLINE_S,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        event_hooks={"request": [service.send_to_the_next]},
    ) as client:
        yield client
