"""The requests by which KubeRay's probes ask whether a pod lives, and whether it may get traffic.

Source: kuberay 1.7, `initLivenessAndReadinessProbe` in ray-operator/controllers/ray/common/pod.go
"""

import asyncio

import httpx

from tests.faults.served.replicas import DEADLINE_S
from tests.k8s.live.cluster import LOCALHOST, PodNode


def urls(pod: PodNode) -> list[str]:
    """Return what a worker's probes ask: the node's agent whether it lives, and the proxy."""
    return [
        f"http://{LOCALHOST}:{pod.agent_port}/api/healthz",
        f"http://{LOCALHOST}:{pod.agent_port}/api/local_raylet_healthz",
        f"http://{LOCALHOST}:{pod.http_port}/-/healthz",
    ]


async def statuses(pod: PodNode) -> list[int | None]:
    """Ask as the probes do; None: nothing listens."""
    async with httpx.AsyncClient(timeout=5) as client:
        return [await _status(client, url) for url in urls(pod)]


async def _status(client: httpx.AsyncClient, url: str) -> int | None:
    try:
        return (await client.get(url)).status_code
    except httpx.TransportError:
        return None


async def ready(pod: PodNode) -> None:
    """Wait until the pod would get traffic."""
    async with asyncio.timeout(DEADLINE_S):
        while set(await statuses(pod)) != {200}:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.1)
