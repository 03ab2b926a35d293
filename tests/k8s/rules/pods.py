"""Rules for pods: what they may do, what they may write, how they start and leave."""

import re
from collections.abc import Iterator
from typing import Any

from k8s.make_base import BASE, DRAIN_S
from serve_app.shipped_files import parse_env
from tests.k8s.manifests import Manifest, num_bytes
from tests.k8s.rules.rendering import Rendering, Rule, containers_of, env_of, ray_container

DIGEST = re.compile(r"[\w.\-/:]+@sha256:[0-9a-f]{64}")
RESTRICTED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim",
    "projected", "secret",
}  # fmt: skip
NEEDS_TOKEN = {"head", "raystream-endpoint-picker"}
"""The autoscaler asks Kubernetes for pods, the picker which pods there are."""

PROBES = {"livenessProbe", "readinessProbe", "startupProbe"}


def _name(pod: Manifest) -> str:
    return str(pod["metadata"]["name"])


def pods_satisfy_the_restricted_standard(r: Rendering) -> Iterator[str]:
    """Source: https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted."""
    for pod in r.pods:
        spec, context = pod["spec"], pod["spec"].get("securityContext", {})
        if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
            yield f"{_name(pod)}: runs as root"
        if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{_name(pod)}: seccompProfile"
        if {"hostNetwork", "hostPID", "hostIPC"} & spec.keys():
            yield f"{_name(pod)}: shares the node's namespaces"
        for volume in spec.get("volumes", ()):
            if kinds := volume.keys() - {"name"} - RESTRICTED_VOLUMES:
                yield f"{_name(pod)}: volume {volume['name']} is {kinds}"
        for container in containers_of(pod):
            yield from _container_faults(_name(pod), container)
    yield from _container_faults("autoscaler", r.cluster["autoscalerOptions"])


def _container_faults(name: str, container: dict[str, Any]) -> Iterator[str]:
    context = container.get("securityContext", {})
    name = f"{name}, {container.get('name', 'container')}"
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: may gain privileges"
    if context.get("capabilities") != {"drop": ["ALL"]}:
        yield f"{name}: keeps capabilities"
    if context.get("privileged") or context.get("runAsNonRoot") is False:
        yield f"{name}: is privileged"
    if context.get("runAsUser") == 0:
        yield f"{name}: runs as root"
    if any("hostPort" in port for port in container.get("ports", ())):
        yield f"{name}: takes a port of the node"


def root_file_systems_are_read_only(r: Rendering) -> Iterator[str]:
    contexts = {
        f"{_name(pod)}, {container['name']}": container.get("securityContext", {})
        for pod in r.pods
        for container in containers_of(pod)
    }
    contexts["autoscaler"] = r.cluster["autoscalerOptions"].get("securityContext", {})
    for name, context in contexts.items():
        if context.get("readOnlyRootFilesystem") is not True:
            yield f"{name}: can write to its image"


def ray_can_write_where_it_must(r: Rendering) -> Iterator[str]:
    for pod in r.ray_pods:
        empty = {volume["name"] for volume in pod["spec"]["volumes"] if "emptyDir" in volume}
        container = ray_container(pod)
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        home = env_of(container).get("HOME")
        for path in ("/tmp", "/tmp/ray", "/dev/shm", home):
            if mounts.get(str(path)) not in empty:
                yield f"{_name(pod)}: {path} can't be written"


def only_those_who_ask_kubernetes_have_its_token(r: Rendering) -> Iterator[str]:
    for pod in r.pods:
        automount = pod["spec"].get("automountServiceAccountToken")
        if _name(pod) not in NEEDS_TOKEN and automount is not False:
            yield f"{_name(pod)}: has a token of Kubernetes that it does not need"
        if _name(pod) in NEEDS_TOKEN and automount is False:
            yield f"{_name(pod)}: lacks the token of Kubernetes"


def no_variables_of_other_services(r: Rendering) -> Iterator[str]:
    for pod in r.pods:
        if pod["spec"].get("enableServiceLinks") is not False:
            yield f"{_name(pod)}: enableServiceLinks"


def images_are_named_by_digest(r: Rendering) -> Iterator[str]:
    for pod in r.pods:
        for container in containers_of(pod):
            if not r.is_local and not DIGEST.fullmatch(container["image"]):
                yield f"{_name(pod)}: {container['image']} has no digest"


def containers_have_bounds(r: Rendering) -> Iterator[str]:
    for pod in r.pods:
        for container in containers_of(pod):
            resources = container.get("resources", {})
            if r.name != "k8s/base" and "memory" not in resources.get("limits", {}):
                yield f"{_name(pod)}, {container['name']}: no limit on memory"
    for pod in r.workers if r.name != "k8s/base" else ():
        limits = ray_container(pod)["resources"]["limits"]
        if "cpu" not in limits:
            yield f"{_name(pod)}: Ray counts the limit's CPUs, and there is none"


def shared_memory_holds_ray_s_object_store(r: Rendering) -> Iterator[str]:
    """Ray takes 30 % of the memory, at most 10 GB, and the disk if that is more than /dev/shm."""
    for group, pod in zip(r.cluster["workerGroupSpecs"], r.workers, strict=True):
        memory = ray_container(pod).get("resources", {}).get("limits", {}).get("memory")
        if memory is None:
            continue  # base leaves it to the overlays
        taken = group["rayStartParams"].get("object-store-memory")
        size = int(taken) if taken else min(0.3 * num_bytes(memory), 10e9)
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        limit = num_bytes(volumes["shared-memory"]["emptyDir"]["sizeLimit"])
        if size > limit:
            yield f"{_name(pod)}: {size:.0f} bytes of objects in a /dev/shm of {limit}"


def probes_are_left_to_kuberay(r: Rendering) -> Iterator[str]:
    """KubeRay's ask Ray's processes and Serve's proxy: they wake no model."""
    for pod in r.ray_pods:
        if probes := PROBES & ray_container(pod).keys():
            yield f"{_name(pod)}: {probes}"


def worker_has_time_to_drain_before_it_is_killed(r: Rendering) -> Iterator[str]:
    for pod in r.workers:
        hook = ray_container(pod).get("lifecycle", {}).get("preStop", {})
        wait_s = hook.get("sleep", {}).get("seconds")
        if not wait_s:
            yield f"{_name(pod)}: preStop is {hook}, not a sleep"
        elif pod["spec"].get("terminationGracePeriodSeconds", 30) < wait_s + DRAIN_S + 20:
            yield f"{_name(pod)}: is killed before it has drained"
    if r.service["spec"].get("rayClusterDeletionDelaySeconds", 60) <= DRAIN_S:
        yield "an upgrade deletes the old cluster while its streams run"


def ray_containers_get_serve_env(r: Rendering) -> Iterator[str]:
    maps = [m for m in r.of_kind("ConfigMap") if "-env-" in m["metadata"]["name"]]
    if [m["data"] for m in maps] != [parse_env((BASE / "serve.env").read_text("utf-8"))]:
        yield "the ConfigMap is not serve.env"
    source = [{"configMapRef": {"name": m["metadata"]["name"]}} for m in maps]
    for pod in r.ray_pods:
        if ray_container(pod).get("envFrom") != source:
            yield f"{_name(pod)}: envFrom"


def worker_groups_keep_base_s_settings(r: Rendering) -> Iterator[str]:
    """A group that a component adds repeats base's: patches can't share them."""
    (first,) = (pod for pod in r.workers if _name(pod) == "workers")
    ours = ray_container(first)
    for pod in r.workers:
        theirs = ray_container(pod)
        for key in ("image", "envFrom", "ports", "lifecycle", "securityContext"):
            if theirs.get(key) != ours[key]:
                yield f"{_name(pod)}: {key} differs from the first group's"
        mounts = [m for m in ours["volumeMounts"] if m not in theirs["volumeMounts"]]
        variables = env_of(ours).items() - env_of(theirs).items()
        if mounts or variables:
            yield f"{_name(pod)}: lacks {mounts or variables}"
        for key in ("securityContext", "terminationGracePeriodSeconds", "priorityClassName"):
            if pod["spec"].get(key) != first["spec"][key]:
                yield f"{_name(pod)}: {key} differs from the first group's"


def workers_are_spread(r: Rendering) -> Iterator[str]:
    for pod in r.workers:
        constraints = pod["spec"].get("topologySpreadConstraints", [])
        if not any(c["topologyKey"] == "topology.kubernetes.io/zone" for c in constraints):
            yield f"{_name(pod)}: may all be in one zone"
        for constraint in constraints:
            labels = constraint["labelSelector"]["matchLabels"]
            if not labels.items() <= pod["metadata"]["labels"].items():
                yield f"{_name(pod)}: a spread counts other pods"
            if constraint.get("matchLabelKeys") != ["ray.io/cluster"]:
                yield f"{_name(pod)}: an upgrade's two clusters are spread as one"


def priority_is_the_head_s_first(r: Rendering) -> Iterator[str]:
    values = {name: each["value"] for name, each in r.named("PriorityClass").items()}
    head = values.get(r.head["spec"].get("priorityClassName"), 0)
    for pod in r.workers:
        if not head > values.get(pod["spec"].get("priorityClassName"), 0) > 0:
            yield f"{_name(pod)}: priority"


def budgets_cover_the_pods(r: Rendering) -> Iterator[str]:
    budgets = r.of_kind("PodDisruptionBudget")
    for budget in budgets:
        if not isinstance(budget["spec"].get("minAvailable"), int):
            yield f"{budget['metadata']['name']}: only a number works, RayCluster has no scale"
    selectors = [budget["spec"]["selector"]["matchLabels"].items() for budget in budgets]
    may_leave = "gcsFaultToleranceOptions" in r.cluster
    for pod in r.ray_pods:
        labels = pod["metadata"]["labels"].items()
        expected = 0 if may_leave and _name(pod) == "head" else 1
        if sum(selector <= labels for selector in selectors) != expected:
            yield f"{_name(pod)}: {expected} budget expected"


RULES: tuple[Rule, ...] = (
    pods_satisfy_the_restricted_standard,
    root_file_systems_are_read_only,
    ray_can_write_where_it_must,
    only_those_who_ask_kubernetes_have_its_token,
    no_variables_of_other_services,
    images_are_named_by_digest,
    containers_have_bounds,
    shared_memory_holds_ray_s_object_store,
    probes_are_left_to_kuberay,
    worker_has_time_to_drain_before_it_is_killed,
    ray_containers_get_serve_env,
    worker_groups_keep_base_s_settings,
    workers_are_spread,
    priority_is_the_head_s_first,
    budgets_cover_the_pods,
)
