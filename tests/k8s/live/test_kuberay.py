"""The live cluster starts with the commands and variables that KubeRay would write."""

from collections.abc import Mapping
from typing import Any

import pytest

from k8s.make_base import BASE
from serve_app.shipped_files import parse_env
from tests.k8s.live.conftest import CPU
from tests.k8s.live.kuberay import head_of, workers_of
from tests.k8s.manifests import Manifest, num_bytes, parse, render


def group(container: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a group of pods with one container."""
    spec = {"terminationGracePeriodSeconds": 330, "containers": [container]}
    return {"rayStartParams": {}, "template": {"spec": spec}, **fields}


SERVICE: Manifest = {
    "spec": {
        "rayClusterConfig": {
            "authOptions": {"mode": "token"},
            "autoscalerOptions": {"version": "v2"},
            "enableInTreeAutoscaling": True,
            "headGroupSpec": group(
                {"resources": {"requests": {"cpu": "1"}, "limits": {"memory": "4Gi"}}},
                rayStartParams={"num-cpus": "0"},
            ),
            "workerGroupSpecs": [
                group(
                    {
                        "resources": {"limits": {"cpu": "2", "memory": "512Mi"}},
                        "env": [{"name": "A", "value": "own"}],
                        "envFrom": [{"configMapRef": {"name": "shared"}}],
                    },
                    groupName="workers",
                    minReplicas=2,
                    labels={"node-kind": "cpu", "a": "b"},
                )
            ],
        }
    }
}
MAPS = {"shared": {"A": "1", "B": "2"}}


def test_the_head_starts_with_the_operator_s_command() -> None:
    assert head_of(SERVICE, MAPS).command({}) == [
        *("/bin/bash", "-c", "--"),
        "ulimit -n 65536; ray start --head --block --dashboard-agent-listen-port=52365 "
        "--dashboard-host=0.0.0.0 --memory=4294967296 --metrics-export-port=8080 --no-monitor "
        "--num-cpus=0",
    ]


def test_each_worker_starts_with_the_operator_s_command() -> None:
    workers = list(workers_of(SERVICE, MAPS))
    assert len(workers) == 2
    for worker in workers:
        assert worker.command({"address": "head:6379"}) == [
            *("/bin/bash", "-c", "--"),
            "ulimit -n 65536; ray start --address=head:6379 --block "
            "--dashboard-agent-listen-port=52365 --labels=a=b,node-kind=cpu --memory=536870912 "
            "--metrics-export-port=8080 --num-cpus=2",
        ]


def test_variables_come_from_the_container_then_from_maps_then_from_the_operator() -> None:
    worker, _ = workers_of(SERVICE, MAPS)
    assert worker.environment.items() >= {"A": "own", "B": "2"}.items()
    assert worker.environment["RAY_AUTH_MODE"] == "token"
    assert worker.environment["RAY_enable_autoscaler_v2"] == "1"
    assert worker.grace_s == 330


@pytest.mark.kubectl
def test_rendered_pods_have_the_variables_of_serve_env() -> None:
    manifests = parse(render(CPU))
    (service,) = (each for each in manifests if each["kind"] == "RayService")
    maps = {m["metadata"]["name"]: m["data"] for m in manifests if m["kind"] == "ConfigMap"}
    shipped = parse_env((BASE / "serve.env").read_text(encoding="utf-8"))
    for pod in (head_of(service, maps), *workers_of(service, maps)):
        assert shipped.items() <= pod.environment.items()


def test_quantities_of_memory_are_read() -> None:
    assert [num_bytes(text) for text in ("512Mi", "4Gi")] == [512 * 2**20, 4 * 2**30]
