"""What KubeRay makes of a RayService: a `ray start` command and variables for each pod.

Without a cluster there is no operator, so this module repeats its rules for the fields that our
manifests use.

Source: kuberay 1.7, ray-operator/controllers/ray/common/pod.go
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.k8s.manifests import Manifest, num_bytes

SHELL = ("/bin/bash", "-c", "--")
"""The command of every container; its argument is a line."""

CLUSTER_NAME = "raystream-x7k2p"
"""KubeRay names a service's cluster after it, with a random end."""


@dataclass(frozen=True, slots=True)
class Pod:
    """What the operator adds to a pod's template."""

    group: str  # the name of its group
    parameters: Mapping[str, str]  # the options of `ray start`
    environment: Mapping[str, str]  # the variables of Ray's container
    grace_s: int  # from the order to stop until the container is killed

    @property
    def is_head(self) -> bool:
        return self.group == "headgroup"

    def command(self, changes: Mapping[str, str]) -> list[str]:
        """Return the container's command; `changes` replace options of `ray start`."""
        options = _options({**self.parameters, **changes})
        role = "--head " if self.is_head else ""
        return [*SHELL, f"ulimit -n 65536; ray start {role}{options}"]


def head_of(service: Manifest, config_maps: Mapping[str, Mapping[str, str]]) -> Pod:
    cluster = service["spec"]["rayClusterConfig"]
    group = cluster["headGroupSpec"]
    parameters = {"dashboard-host": "0.0.0.0"}
    if cluster.get("enableInTreeAutoscaling"):
        parameters["no-monitor"] = "true"  # the autoscaler has a container of its own
    return _pod(cluster, group, "headgroup", parameters, config_maps)


def workers_of(service: Manifest, config_maps: Mapping[str, Mapping[str, str]]) -> Iterator[Pod]:
    """Return the pods with which the groups of workers start."""
    cluster = service["spec"]["rayClusterConfig"]
    for group in cluster["workerGroupSpecs"]:
        pod = _pod(cluster, group, group["groupName"], {}, config_maps)
        yield from [pod] * group["minReplicas"]


def _pod(
    cluster: Mapping[str, Any],
    group: Mapping[str, Any],
    name: str,
    parameters: Mapping[str, str],
    config_maps: Mapping[str, Mapping[str, str]],
) -> Pod:
    spec = group["template"]["spec"]
    container = spec["containers"][0]
    return Pod(
        group=name,
        parameters={
            **_resources(container.get("resources", {})),
            **parameters,
            "block": "true",
            "dashboard-agent-listen-port": "52365",
            "metrics-export-port": "8080",
            **_labels(group.get("labels", {})),
            **group["rayStartParams"],
        },
        environment=_of_the_operator(cluster, name) | _environment(container, config_maps),
        grace_s=spec["terminationGracePeriodSeconds"],
    )


def _resources(resources: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return what Ray is told to have: the limits, or the requested CPUs where none limits them."""
    limits = resources.get("limits", {})
    cpu = limits.get("cpu", resources.get("requests", {}).get("cpu"))
    parameters = {} if cpu is None else {"num-cpus": str(int(cpu))}
    if "memory" in limits:
        parameters["memory"] = str(num_bytes(limits["memory"]))
    return parameters


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the option that gives Ray's node a group's labels."""
    written = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    return {"labels": written} if written else {}


def _environment(
    container: Mapping[str, Any], config_maps: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    named = [source["configMapRef"]["name"] for source in container.get("envFrom", [])]
    together = {key: value for name in named for key, value in config_maps[name].items()}
    own = {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}
    return together | own


def _of_the_operator(cluster: Mapping[str, Any], group: str) -> dict[str, str]:
    """Return the operator's variables, but for addresses, names of pods and the token."""
    variables = {
        "RAY_CLUSTER_NAME": CLUSTER_NAME,
        "RAY_NODE_TYPE_NAME": group,
        "RAY_timeout_ms_task_wait_for_death_info": "0",
        "RAY_gcs_server_request_timeout_seconds": "5",
        "RAY_SERVE_KV_TIMEOUT_S": "5",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
    }
    if cluster.get("autoscalerOptions", {}).get("version") == "v2":
        variables["RAY_enable_autoscaler_v2"] = "1"
    if cluster.get("authOptions", {}).get("mode") == "token":
        variables["RAY_AUTH_MODE"] = "token"
    return variables


def _options(parameters: Mapping[str, str]) -> str:
    """Write options in the order of their names; a switch has no value."""
    switches = {"true": "--{}", "false": ""}
    written = [
        switches.get(value, f"--{{}}={value}").format(name)
        for name, value in sorted(parameters.items())
    ]
    return " ".join(filter(None, written))
