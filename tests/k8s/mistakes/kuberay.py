"""Mistakes that KubeRay refuses, or that keep its pods from working together."""

from tests.k8s.mistakes.mistake import Mistake, container_of, group_of, template_of
from tests.k8s.rules import kuberay
from tests.k8s.rules.rendering import Rendering


def _no_token(r: Rendering) -> None:
    r.cluster["authOptions"]["mode"] = "disabled"


def _logs_not_shared(r: Rendering) -> None:
    for mount in container_of(r, "head")["volumeMounts"]:
        if mount["mountPath"] == "/tmp/ray":
            mount["name"] = "tmp"


def _head_with_cpus(r: Rendering) -> None:
    r.cluster["headGroupSpec"]["rayStartParams"].pop("num-cpus")


def _port_renamed(r: Rendering) -> None:
    for port in container_of(r, "workers")["ports"]:
        if port["name"] == "serve":
            port["name"] = "http"


def _no_gateway_class(r: Rendering) -> None:
    r.service["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]["gatewayClassName"] = ""


def _redis_twice(r: Rendering) -> None:
    container_of(r, "head")["env"].append({"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"})


def _long_name(r: Rendering) -> None:
    r.service["metadata"]["name"] = "raystream-of-the-research-department-in-frankfurt"


def _labels_as_an_option(r: Rendering) -> None:
    group = group_of(r, "workers")
    group["rayStartParams"]["labels"] = f"node-kind={group.pop('labels')['node-kind']}"


def _another_ray(r: Rendering) -> None:
    r.cluster["rayVersion"] = "2.59.0"


def _restarts(r: Rendering) -> None:
    template_of(r, "gpu-workers")["spec"]["restartPolicy"] = "Always"


def _alpha_backend(r: Rendering) -> None:
    r.cluster["gcsFaultToleranceOptions"] |= {"backend": "rocksdb"}


MISTAKES = (
    Mistake(
        "Ray without a token", "cpu", _no_token, kuberay.authentication_is_by_ray_s_token
    ),
    Mistake(
        "a head whose logs the autoscaler can't share",
        "cpu", _logs_not_shared, kuberay.autoscaler_shares_the_head_s_logs,
    ),
    Mistake(
        "replicas on the head",
        "cpu", _head_with_cpus, kuberay.head_runs_no_replica_and_names_no_service,
    ),
    Mistake(
        "a port by another name than KubeRay looks for",
        "cpu", _port_renamed, kuberay.ports_have_the_names_that_kuberay_expects,
    ),
    Mistake(
        "an incremental upgrade without a Gateway",
        "incremental-upgrade", _no_gateway_class, kuberay.upgrade_is_one_that_kuberay_takes,
    ),
    Mistake(
        "Redis named twice: KubeRay refuses the service",
        "head-ha", _redis_twice, kuberay.redis_is_named_in_one_place,
    ),
    Mistake(
        "a name that leaves no room for KubeRay's suffixes",
        "cpu", _long_name, kuberay.name_leaves_room_for_suffixes,
    ),
    Mistake(
        "labels among the options of `ray start`: KubeRay refuses the service",
        "gpu-multi", _labels_as_an_option, kuberay.groups_are_valid,
    ),
    Mistake(
        "another Ray than the image's: KubeRay and the pods disagree about what it can do",
        "cpu", _another_ray, kuberay.ray_version_is_the_locked_one,
    ),
    Mistake(
        "pods that restart: the autoscaler takes them for new nodes",
        "gpu-single", _restarts, kuberay.pods_of_autoscaler_v2_never_restart,
    ),
    Mistake(
        "an alpha backend for the head's state: KubeRay refuses it by default",
        "head-ha", _alpha_backend, kuberay.base_needs_no_feature_gate,
    ),
)  # fmt: skip
