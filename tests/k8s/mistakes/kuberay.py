"""Mistakes that KubeRay refuses, or that keep its pods from working together."""

from tests.k8s.mistakes.mistake import container_of, group_of, mistake, template_of
from tests.k8s.rules import kuberay
from tests.k8s.rules.rendering import Rendering


@mistake("Ray without a token", "cpu", kuberay.authentication_is_by_ray_s_token)
def _no_token(r: Rendering) -> None:
    r.cluster["authOptions"]["mode"] = "disabled"


@mistake(
    "a head whose logs the autoscaler can't share", "cpu", kuberay.autoscaler_shares_the_head_s_logs
)
def _logs_not_shared(r: Rendering) -> None:
    for mount in container_of(r, "head")["volumeMounts"]:
        if mount["mountPath"] == "/tmp/ray":
            mount["name"] = "tmp"


@mistake("replicas on the head", "cpu", kuberay.head_runs_no_replica_and_names_no_service)
def _head_with_cpus(r: Rendering) -> None:
    r.cluster["headGroupSpec"]["rayStartParams"].pop("num-cpus")


@mistake(
    "a port by another name than KubeRay looks for",
    "cpu",
    kuberay.ports_have_the_names_that_kuberay_expects,
)
def _port_renamed(r: Rendering) -> None:
    for port in container_of(r, "workers")["ports"]:
        if port["name"] == "serve":
            port["name"] = "http"


@mistake(
    "an incremental upgrade without a Gateway",
    "incremental-upgrade",
    kuberay.upgrade_is_one_that_kuberay_takes,
)
def _no_gateway_class(r: Rendering) -> None:
    r.service["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]["gatewayClassName"] = ""


@mistake(
    "Redis named twice: KubeRay refuses the service", "head-ha", kuberay.redis_is_named_in_one_place
)
def _redis_twice(r: Rendering) -> None:
    container_of(r, "head")["env"].append({"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"})


@mistake(
    "a name that leaves no room for KubeRay's suffixes",
    "cpu",
    kuberay.name_leaves_room_for_suffixes,
)
def _long_name(r: Rendering) -> None:
    r.service["metadata"]["name"] = "raystream-of-the-research-department-in-frankfurt"


@mistake(
    "labels among the options of `ray start`: KubeRay refuses the service",
    "gpu-multi",
    kuberay.groups_are_valid,
)
def _labels_as_an_option(r: Rendering) -> None:
    group = group_of(r, "workers")
    group["rayStartParams"]["labels"] = f"node-kind={group.pop('labels')['node-kind']}"


@mistake(
    "another Ray than the image's: KubeRay and the pods disagree about what it can do",
    "cpu",
    kuberay.ray_version_is_the_locked_one,
)
def _another_ray(r: Rendering) -> None:
    r.cluster["rayVersion"] = "2.59.0"


@mistake(
    "pods that restart: the autoscaler takes them for new nodes",
    "gpu-single",
    kuberay.pods_of_autoscaler_v2_never_restart,
)
def _restarts(r: Rendering) -> None:
    template_of(r, "gpu-workers")["spec"]["restartPolicy"] = "Always"


@mistake(
    "an alpha backend for the head's state: KubeRay refuses it by default",
    "head-ha",
    kuberay.base_needs_no_feature_gate,
)
def _alpha_backend(r: Rendering) -> None:
    r.cluster["gcsFaultToleranceOptions"] |= {"backend": "rocksdb"}
