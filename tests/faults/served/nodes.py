"""Nodes of a Ray cluster on this machine, each started as a user starts one."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.free_port import free_port
from serve_app.commands.server_environment import LOOPBACK, server_environment
from tests.faults.served.replicas import FOLDER
from tests.ray.serve_run import ROOT, haproxy_environment

RAY = str(Path(sys.executable).parent / "ray")
DRAIN_S = 60


class Node:
    """One `ray start --block` with all its processes."""

    def __init__(
        self, command: list[str], environment: dict[str, str], log: Path, http_port: int
    ) -> None:
        self.log = log
        self.http_port = http_port
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._known: set[psutil.Process] = set()

    def processes(self) -> set[psutil.Process]:
        """Return all processes of the node that are known, also those that have ended."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            self._known |= {root, *root.children(recursive=True)}
        return self._known

    def process_ids(self) -> set[int]:
        return {process.pid for process in self.processes()}

    def has_connection(self, client: tuple[str, int]) -> bool:
        """Whether the connection of a client's socket ends at one of its processes."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if any(each.raddr == client for each in process.net_connections("tcp")):
                    return True
        return False

    def terminate(self) -> None:
        """Ask the node to stop, as Kubernetes does."""
        self.processes()
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all its processes at once."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


class Cluster:
    """A head, and one worker at a time."""

    def __init__(self, folder: Path, *, has_haproxy: bool = False, num_gpus: int = 0) -> None:
        """Start the head; with `has_haproxy` each node has a HAProxy with a port of its own.

        In plain mode the nodes' proxies share one port, and the kernel gives a connection to any.
        """
        self.folder = folder
        self._has_haproxy = has_haproxy
        # The paths of sockets must be short.
        self._temp_dir = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))
        self._port, self.dashboard_port = free_port(), free_port()
        self._environment = {
            **os.environ,
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_S),
            **(haproxy_environment() if has_haproxy else {}),
            "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
            "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "5",
            FOLDER: str(folder),
        }
        self.head = self._start(
            "head",
            free_port(),
            "--head",
            f"--port={self._port}",
            f"--temp-dir={self._temp_dir}",
            f"--dashboard-port={self.dashboard_port}",
            "--dashboard-host=127.0.0.1",
            f"--ray-client-server-port={free_port()}",
            f"--num-gpus={num_gpus}",
        )
        self.workers: list[Node] = []

    def _start(self, name: str, http_port: int, *arguments: str) -> Node:
        environment = self._environment
        if self._has_haproxy:
            environment = server_environment(environment, self._temp_dir / name)
            del environment[LOOPBACK]  # a Ray that listens only there takes no second node
            environment["RAY_SERVE_WORKER_PROXY_HTTP_PORT"] = str(http_port)
        command = [
            *(RAY, "start", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=2"),
            *("--disable-usage-stats", f"--dashboard-agent-listen-port={free_port()}"),
            f"--metrics-export-port={free_port()}",
            *arguments,
        ]
        return Node(command, environment, self.folder / f"{name}.log", http_port)

    def add_worker(self, num_gpus: int = 0) -> Node:
        """Start another node."""
        name = f"worker-{len(self.workers)}"
        http_port = free_port() if self._has_haproxy else self.head.http_port
        joined = (f"--address=127.0.0.1:{self._port}", f"--num-gpus={num_gpus}")
        self.workers.append(self._start(name, http_port, *joined))
        return self.workers[-1]

    def stop(self) -> None:
        """End everything."""
        for node in (*self.workers, self.head):
            node.kill()
        shutil.rmtree(self._temp_dir, ignore_errors=True)
