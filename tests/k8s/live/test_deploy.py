"""The rendered configuration of overlays/cpu runs on a head and two workers."""

from pathlib import Path

import httpx
import pytest

from tests.faults.served.answer import COUNTED, Answer, read
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.redeploy import APPLICATIONS, Deployed
from tests.k8s.live import http2, probes
from tests.k8s.live.cluster import API_KEY, LOCALHOST, LocalCluster
from tests.k8s.live.conftest import Service
from tests.k8s.live.nginx import component_directives, nginx
from tests.k8s.live.placement import nodes_of
from tests.measured import Record

BODY = about("os.path.join", **SEEDED, max_tokens=100)


async def test_replicas_run_on_workers_only(
    cluster: LocalCluster, deployed: Deployed, record: Record
) -> None:
    workers = {worker.name for worker in cluster.alive}
    placed = await nodes_of(deployed)
    assert placed.keys() == {"Ingress", "pydoc-chat", "pydoc-detector", "pydoc-search"}
    assert set().union(*placed.values()) <= workers
    record("seconds from the first `ray start`", cluster.times_s)


async def test_every_worker_streams_to_a_client_with_a_key(
    client: httpx.AsyncClient, service: Service
) -> None:
    answers = [await read(client, BODY) for _ in service.ports]
    assert {answer.server[1] for answer in answers} == set(service.ports)
    assert len({str(answer.essence) for answer in answers}) == 1
    assert answers[0].num_tokens == 100


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-of-nobody-000000"}])
async def test_requests_without_a_known_key_are_refused_at_every_pod(
    client: httpx.AsyncClient, cluster: LocalCluster, headers: dict[str, str]
) -> None:
    for pod in (cluster.head, *cluster.alive):
        url = f"http://{LOCALHOST}:{pod.http_port}/v1/chat/completions"
        async with httpx.AsyncClient(headers=headers) as stranger:
            answer = await stranger.post(url, json=BODY)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_the_dashboard_asks_for_ray_s_token_in_the_operator_s_header(
    cluster: LocalCluster, deployed: Deployed
) -> None:
    url = f"{deployed.dashboard_url}{APPLICATIONS}"
    known = {"x-ray-authorization": f"Bearer {cluster.token}"}
    async with httpx.AsyncClient() as client:
        statuses = [
            (await client.get(url, headers=headers)).status_code
            for headers in ({}, {"x-ray-authorization": "Bearer wrong"}, known)
        ]
    assert statuses == [401, 403, 200]


async def test_the_operator_s_probes_need_neither_token_nor_key(
    client: httpx.AsyncClient, cluster: LocalCluster
) -> None:
    for worker in cluster.alive:
        assert await probes.statuses(worker) == [200, 200, 200]


@pytest.mark.nginx
async def test_a_client_of_http_2_streams_through_nginx(
    client: httpx.AsyncClient, service: Service, tmp_path: Path
) -> None:
    direct = await read(client, BODY)
    told = {**BODY, "stream": True, "stream_options": COUNTED}
    with nginx(tmp_path, service.ports, component_directives()) as running:
        for _ in service.ports:
            answer = await _read_by_http2(running.tls_port, told)
            assert answer.essence == direct.essence


async def _read_by_http2(port: int, body: dict[str, object]) -> Answer:
    answer = Answer("http2")
    key = {"authorization": f"Bearer {API_KEY}"}
    async with http2.post(port, "/v1/chat/completions", body, key) as stream:
        answer.status = await stream.next("status")
        for line in (await stream.rest()).splitlines():
            answer.take(line)
    return answer
