"""The processes of a server's ingresses."""

from dataclasses import dataclass

import psutil

from tests.ray.serve_run import Server

TITLE = "ray::ServeReplica:raystream:Ingress"


@dataclass(frozen=True)
class Ingresses:
    """Those that a server has at the time of each question."""

    server: Server

    def processes(self) -> list[int]:
        return [process.pid for process in self.server.processes(TITLE)]

    def rss_bytes(self) -> int:
        """Return their resident memory together."""
        found = self.processes()
        assert found
        return sum(psutil.Process(each).memory_info().rss for each in found)

    def num_fds(self) -> int:
        """Return how many files they have open together."""
        return sum(psutil.Process(each).num_fds() for each in self.processes())
