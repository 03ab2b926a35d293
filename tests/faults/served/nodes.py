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
from tests.faults.served.fragile_generator import FOLDER
from tests.ray.serve_run import ROOT

RAY = str(Path(sys.executable).parent / "ray")
DRAIN_S = 60


class Node:
    """One `ray start --block` with all its processes."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(RAY, "start", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=2"),
                    *("--disable-usage-stats", f"--dashboard-agent-listen-port={free_port()}"),
                    f"--metrics-export-port={free_port()}",
                    *arguments,
                ],
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
        """Return their ids."""
        return {process.pid for process in self.processes()}

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

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The paths of Ray's sockets must be short.
        self._temp_dir = tempfile.mkdtemp(prefix="nodes-", dir="/tmp")
        self._port, self.dashboard_port = free_port(), free_port()
        self._environment = {
            **os.environ,
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_S),
            "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
            "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "5",
            FOLDER: str(folder),
        }
        self.head = self._start(
            "head",
            "--head",
            f"--port={self._port}",
            f"--temp-dir={self._temp_dir}",
            f"--dashboard-port={self.dashboard_port}",
            "--dashboard-host=127.0.0.1",
            f"--ray-client-server-port={free_port()}",
        )
        self.workers: list[Node] = []

    def _start(self, name: str, *arguments: str) -> Node:
        return Node(list(arguments), self._environment, self._folder / f"{name}.log")

    def add_worker(self) -> Node:
        """Start another node."""
        name = f"worker-{len(self.workers)}"
        self.workers.append(self._start(name, f"--address=127.0.0.1:{self._port}"))
        return self.workers[-1]

    def stop(self) -> None:
        """End everything."""
        for node in (*self.workers, self.head):
            node.kill()
        shutil.rmtree(self._temp_dir, ignore_errors=True)
