"""Changes to a running server, as `serve deploy` makes them."""

import asyncio
import copy
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.faults.served.replicas import DEADLINE_S
from tests.ray.serve_run import Server

APPLICATIONS = "/api/serve/applications/"
_DASHBOARD = re.compile(r"http://(127\.0\.0\.1:\d+)")


@dataclass
class Deployed:
    """The configuration that a server runs.

    Attributes:
        server: The server.
        home: Its HOME, where Ray keeps the token.
        document: The configuration, as in the file.
    """

    server: Server
    home: Path
    document: dict[str, Any]
    _first: dict[str, Any] = field(init=False)

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

    async def details(self) -> dict[str, Any]:
        """Return what Serve says about the application."""
        async with self._client() as client:
            response = await client.get(APPLICATIONS)
        details: dict[str, Any] = response.json()["applications"][self.application["name"]]
        return details

    async def settled(self) -> None:
        """Wait until the application runs as configured."""
        async with asyncio.timeout(DEADLINE_S):
            while not await self._is_settled():  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.1)

    async def _is_settled(self) -> bool:
        details = await self.details()
        deployments = details["deployments"].values()
        return details["status"] == "RUNNING" and all(
            each["status"] == "HEALTHY" for each in deployments
        )

    def _client(self) -> httpx.AsyncClient:
        found = _DASHBOARD.search(self.server.log.read_text())
        assert found is not None, "Ray has named its dashboard"
        token = (self.home / ".ray" / "auth_token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.AsyncClient(base_url=f"http://{found[1]}", headers=headers, timeout=60)
