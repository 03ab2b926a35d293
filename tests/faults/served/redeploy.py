"""Changes to a running server, as `serve deploy` makes them."""

import asyncio
import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from tests.faults.served.replicas import DEADLINE_S
from tests.ray.serve_run import Server

APPLICATIONS = "/api/serve/applications/"
_DASHBOARD = re.compile(r"http://(127\.0\.0\.1:\d+)")


@dataclass
class Deployed:
    """The configuration that a server runs."""

    dashboard_url: str  # where Ray's dashboard listens
    document: dict[str, Any]  # the configuration, as in the file
    token: str = ""  # Ray's token, if it asks for one
    _first: dict[str, Any] = field(init=False)

    @classmethod
    def of(cls, server: Server, home: Path, document: dict[str, Any]) -> Self:
        """Return the configuration that a server was started with; Ray keeps a token in `home`."""
        found = _DASHBOARD.search(server.log.read_text())
        assert found is not None, "Ray has named its dashboard"
        token = (home / ".ray" / "auth_token").read_text().strip()
        return cls(found[0], document, token)

    def __post_init__(self) -> None:
        self._first = copy.deepcopy(self.document)

    @property
    def application(self) -> dict[str, Any]:
        """The only application of the configuration; a test changes it and calls `apply`."""
        application: dict[str, Any] = self.document["applications"][0]
        return application

    @property
    def models(self) -> list[dict[str, Any]]:
        """The entries under `args: models`."""
        models: list[dict[str, Any]] = self.application["args"]["models"]
        return models

    def section(self, name: str) -> dict[str, Any]:
        """Return the section of a deployment."""
        (found,) = (each for each in self.application["deployments"] if each["name"] == name)
        section: dict[str, Any] = found
        return section

    def restore(self) -> None:
        """Return to the configuration that the server was started with, without applying it."""
        self.document = copy.deepcopy(self._first)

    async def apply(self) -> None:
        """Apply the configuration; Serve then works on it."""
        async with self._client() as client:
            response = await client.put(APPLICATIONS, json=self.document)
            assert response.status_code == 200, response.text

    async def remove(self) -> None:
        """Remove all applications, and wait until they are gone."""
        async with self._client() as client, asyncio.timeout(DEADLINE_S):
            await client.delete(APPLICATIONS)
            while await _applications(client):  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.1)

    async def reachable(self, num_nodes: int) -> None:
        """Wait until the dashboard answers and shows this many nodes."""
        async with self._client() as client, asyncio.timeout(DEADLINE_S):
            while await _num_alive(client) < num_nodes:  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.1)

    async def details(self) -> dict[str, Any]:
        """Return what Serve says about the application."""
        async with self._client() as client:
            response = await client.get(APPLICATIONS)
        details: dict[str, Any] = response.json()["applications"][self.application["name"]]
        return details

    async def running_replicas(self) -> dict[str, list[dict[str, Any]]]:
        """Return the replicas of each deployment that Serve routes to."""
        deployments = (await self.details())["deployments"]
        return {
            name: [each for each in details["replicas"] if each["state"] == "RUNNING"]
            for name, details in deployments.items()
        }

    async def settled(self) -> None:
        """Wait until exactly the configured replicas run: none starts, stops or is missing."""
        async with self._client() as client, asyncio.timeout(DEADLINE_S):
            applications = await _applications(client)
            while not is_settled(applications, self.document):
                await asyncio.sleep(0.1)
                applications = await _applications(client)

    def _client(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return httpx.AsyncClient(base_url=self.dashboard_url, headers=headers, timeout=60)


def is_settled(applications: Mapping[str, Any], document: Mapping[str, Any]) -> bool:
    """Whether Serve runs the applications of a file, and no others, with all their replicas.

    Serve answers a new file only when each of its applications has the status DEPLOYING, so what
    it says afterwards is about that file.
    """
    for application in applications.values():
        assert application["status"] != "DEPLOY_FAILED", application["message"]
    return applications.keys() == {each["name"] for each in document["applications"]} and all(
        application["status"] == "RUNNING"
        and all(map(_is_complete, application["deployments"].values()))
        for application in applications.values()
    )


def _is_complete(deployment: Mapping[str, Any]) -> bool:
    states = [replica["state"] for replica in deployment["replicas"]]
    wanted = ["RUNNING"] * deployment["target_num_replicas"]
    return deployment["status"] == "HEALTHY" and states == wanted


async def _num_alive(client: httpx.AsyncClient) -> int:
    try:
        response = await client.get("/nodes?view=summary")
    except httpx.TransportError:
        return 0
    if response.status_code != 200:
        return 0
    nodes = response.json()["data"]["summary"]
    return sum(node["raylet"]["state"] == "ALIVE" for node in nodes)


async def _applications(client: httpx.AsyncClient) -> dict[str, Any]:
    applications: dict[str, Any] = (await client.get(APPLICATIONS)).json()["applications"]
    return applications
