"""One real server for all packages whose servers differ only in their file.

A start takes half a minute and a new file a few seconds, so each package has its file deployed to
the server that runs already. `tests/faults/served/fragile_generator.py` writes down what its
replicas do.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.served.fragile_server import fragile_server
from tests.faults.served.redeploy import APPLICATIONS, Deployed, is_settled
from tests.faults.served.replicas import DEADLINE_S, is_alive
from tests.ray.serve_run import Server, wait_until

POLL_S = 0.2
"""Each question makes Serve's controller and a search of all processes work."""

REPLICA = "ray::ServeReplica:"
"""How the title of a replica's process begins."""


class ChangingServer:
    """A server that starts with the first file and gets each further one deployed."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self.folder = folder  # where `FragileGenerator` writes, and HOME of the server
        self.document: dict[str, Any] = {}  # the file that is served now
        self._running = running
        self._server: Server | None = None
        self._is_changed = False  # whether Serve may have another file than `document`

    @property
    def server(self) -> Server:
        """The server, once a first file is served."""
        assert self._server is not None, "nothing is served yet"
        return self._server

    def serve(self, document: Mapping[str, Any]) -> Server:
        """Serve this file at the port of the first one, and wait until nothing else runs."""
        wanted = copy.deepcopy(dict(document))
        if self._server is None:
            self._server = self._running.enter_context(fragile_server(self.folder, wanted))
        else:
            wanted["http_options"] = self.document["http_options"]
            self._is_changed |= wanted != self.document
        self.document = wanted
        self.settle()
        return self._server

    @contextmanager
    def serve_meanwhile(self, document: Mapping[str, Any]) -> Iterator[Server]:
        """Serve this file until the end of the block; the one before returns when it is needed."""
        before = self.document
        yield self.serve(document)
        if before:
            self.document = before
            self._is_changed = True

    def settle(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait until the replicas of the file run, and no others; restore it if it was changed."""
        if self._is_changed:
            self._put(self.document)
            self._is_changed = False
        wait_until(self._is_settled, deadline_s, POLL_S)

    @asynccontextmanager
    async def changeable(self) -> AsyncIterator[Deployed]:
        """Give a test the current file, which it may change and deploy.

        It is restored when it is needed: the next test may be of a package with another file.
        """
        await asyncio.to_thread(self.settle)
        try:
            yield self.deployed()
        finally:
            self._is_changed = True

    def deployed(self) -> Deployed:
        """Return the current file, and what Serve says about it."""
        return Deployed.of(self.server, self.folder, copy.deepcopy(self.document))

    def _put(self, document: dict[str, Any]) -> None:
        with self._dashboard() as dashboard:
            answer = dashboard.put(APPLICATIONS, json=document)
        assert answer.status_code == 200, answer.text

    def _is_settled(self) -> bool:
        """Whether Serve's list of replicas is complete, and equal to that of the processes.

        Serve's list lacks the replicas of a deployment that is being removed, and has one that has
        died until Serve checks its health.
        """
        with self._dashboard() as dashboard:
            found = dashboard.get(APPLICATIONS).json()["applications"]
        if not is_settled(found, self.document):
            return False
        listed = {
            replica["pid"]
            for application in found.values()
            for deployment in application["deployments"].values()
            for replica in deployment["replicas"]
        }
        running = {each.pid for each in self.server.processes(REPLICA) if is_alive(each.pid)}
        return listed == running and self.server.is_ready()

    def _dashboard(self) -> httpx.Client:
        deployed = self.deployed()
        headers = {"Authorization": f"Bearer {deployed.token}"}
        return httpx.Client(base_url=deployed.dashboard_url, headers=headers, timeout=60)


@pytest.fixture(scope="session")
def changing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChangingServer]:
    """Return the server; it starts with the first file and stops after the last test."""
    with ExitStack() as running:
        yield ChangingServer(tmp_path_factory.mktemp("changing-server"), running)
