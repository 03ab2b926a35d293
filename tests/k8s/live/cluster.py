"""A rendered overlay on this machine: its pods are processes, started as KubeRay starts them.

What a pod has of its own, an address, ports, folders, and the Secret's file, it gets here by
options and variables. Everything else is the manifests': commands, resources, environment, and
`serveConfigV2`.
"""

import copy
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from serve_app.commands.server_environment import (
    HAPROXY_BINARY,
    HAPROXY_PORTS,
    LOOPBACK,
    each_free_port,
    is_free,
    server_environment,
)
from serve_app.keys.api_keys import hash_key
from tests.faults.served.nodes import Node
from tests.k8s.live.kuberay import CLUSTER_NAME, Pod, head_of, workers_of
from tests.k8s.manifests import ROOT, parse, render
from tests.ray.serve_run import wait_until

LOCALHOST = "127.0.0.1"
API_KEY = "sk-of-the-tests-0000000"
BIN = Path(sys.executable).parent

START_DEADLINE_S = 120

OBJECT_STORE = 0.3
"""The part of a container's memory that Ray takes for objects."""

AS_RENDERED: Mapping[str, str] = {}

WITHOUT_LOAD_BALANCER: Mapping[str, str] = {
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1",
}
"""How long proxies and ingresses stay for a load balancer to learn that their pod leaves. Here a
test knows it before."""


class PodNode(Node):
    """A pod's processes."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        http_port: int,
        agent_port: int,
    ) -> None:
        super().__init__(command, environment, log, http_port)
        self.name = name  # the pod's, by which Serve names the node
        self.agent_port = agent_port  # where Ray's agent answers the operator's probes

    @property
    def is_alive(self) -> bool:
        """Whether its first process has not ended."""
        return self.process.poll() is None


class LocalCluster:
    """A head and its workers, with Ray's token and an API key."""

    def __init__(self, folder: Path, overlay: Path, environment: Mapping[str, str]) -> None:
        """Start the head of an overlay's folder; `environment` replaces variables of all pods."""
        manifests = parse(render(overlay))
        (service,) = (each for each in manifests if each["kind"] == "RayService")
        maps = {m["metadata"]["name"]: m["data"] for m in manifests if m["kind"] == "ConfigMap"}
        self.folder = folder
        # When the cluster reached a state for the first time, since its start.
        self.times_s: dict[str, float] = {}
        self._started_s = time.monotonic()
        self._changes = environment
        self.token = secrets.token_hex(32)  # Ray's
        self._rendered: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
        self._keys = folder / "keys.yaml"
        entry = {"name": "tests", "sha256": hash_key(API_KEY), "scopes": ["operate"]}
        self._keys.write_text(yaml.safe_dump({"keys": [entry]}))
        self._keys.chmod(0o600)
        self._sessions = Path(
            tempfile.mkdtemp(prefix="pods-", dir="/tmp")
        )  # sockets have short paths
        self._ports = each_free_port()
        self._gcs_port, self.dashboard_port = next(self._ports), next(self._ports)
        self.workers: list[PodNode] = []  # all that were started
        self.worker_pods = list(workers_of(service, maps))  # those that the manifests ask for
        self.head_pod = head_of(service, maps)
        self.head = self._start(self.head_pod, "head", self._of_the_head())

    def _of_the_head(self) -> dict[str, str]:
        return {
            "port": str(self._gcs_port),
            "dashboard-host": LOCALHOST,
            "dashboard-port": str(self.dashboard_port),
            "ray-client-server-port": str(next(self._ports)),
        }

    def complete(self) -> None:
        """Start the workers that are missing, as the operator replaces pods."""
        # The operator's init container waits for the head's GCS.
        wait_until(lambda: not is_free(LOCALHOST, self._gcs_port), START_DEADLINE_S)
        address = {"address": f"{LOCALHOST}:{self._gcs_port}"}
        for pod in self.worker_pods[len(self.alive) :]:
            self.workers.append(self._start(pod, f"w{len(self.workers)}", address))

    @property
    def age_s(self) -> float:
        """Seconds since its start."""
        return round(time.monotonic() - self._started_s, 1)

    @property
    def alive(self) -> list[PodNode]:
        """The workers that have not ended."""
        return [each for each in self.workers if each.is_alive]

    def _start(self, pod: Pod, name: str, changes: dict[str, str]) -> PodNode:
        http_port, agent_port = next(self._ports), next(self._ports)
        own = {
            "node-ip-address": LOCALHOST,
            "dashboard-agent-listen-port": str(agent_port),
            "metrics-export-port": str(next(self._ports)),
            # Ray would take its part of the machine's memory.
            "object-store-memory": str(int(int(pod.parameters["memory"]) * OBJECT_STORE)),
            "temp-dir": str(self._sessions / name),
        }
        return PodNode(
            f"{CLUSTER_NAME}-{name}",
            pod.command({**own, **changes}),
            self._environment(pod, name, http_port),
            self.folder / f"{name}.log",
            http_port,
            agent_port,
        )

    def _environment(self, pod: Pod, name: str, http_port: int) -> dict[str, str]:
        home = self.folder / name
        home.mkdir()
        outside = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        environment = {
            **outside,
            **{variable: str(next(self._ports)) for variable in HAPROXY_PORTS},
            **pod.environment,
            **self._changes,
            "HOME": str(home),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_CLOUD_INSTANCE_ID": f"{CLUSTER_NAME}-{name}",
            "RAY_ADDRESS": f"{LOCALHOST}:{self._gcs_port}",
            "RAY_AUTH_TOKEN": self.token,
            # The image sets it.
            HAPROXY_BINARY: str(BIN / "raystream-haproxy"),
            # All pods share the machine's cores, so a process takes longer to start.
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        }
        if not pod.is_head:
            environment["RAY_SERVE_WORKER_PROXY_HTTP_PORT"] = str(http_port)
        environment = server_environment(environment, self._sessions / name / "h")
        del environment[LOOPBACK]  # a Ray that listens only there takes no second node
        return environment

    def serve_config(self) -> dict[str, Any]:
        """Return the rendered configuration with this machine's address, port and file of keys."""
        document = copy.deepcopy(self._rendered)
        document["http_options"] |= {"host": LOCALHOST, "port": self.head.http_port}
        document["applications"][0]["args"]["auth"]["api_keys_file"] = str(self._keys)
        return document

    def stop(self) -> list[str]:
        """End everything; return the processes that are left nevertheless."""
        nodes = (*self.workers, self.head)
        known = set[psutil.Process]().union(*(node.processes() for node in nodes))
        for node in nodes:
            node.kill()
        psutil.wait_procs(known, timeout=10)
        shutil.rmtree(self._sessions, ignore_errors=True)
        return [str(each) for each in known if each.is_running() and not is_zombie(each)]


def is_zombie(process: psutil.Process) -> bool:
    """Whether a process has ended, and only its parent has not noticed."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def local_cluster(
    folder: Path, overlay: Path, environment: Mapping[str, str]
) -> Iterator[LocalCluster]:
    """Start a cluster with all its workers; nothing of it outlives the block."""
    cluster = LocalCluster(folder, overlay, environment)
    try:
        cluster.complete()
        yield cluster
    finally:
        left = cluster.stop()
    assert left == []
