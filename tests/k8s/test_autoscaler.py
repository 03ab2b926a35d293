"""Ray's own autoscaler reads the manifests, and decides which pods it would ask Kubernetes for."""

from collections.abc import Mapping
from typing import Any

import pytest
from ray._raylet import IMPLICIT_RESOURCE_PREFIX  # type: ignore[attr-defined] # without stubs
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.autoscaler.v2.event_logger import AutoscalerEventLogger
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.common_pb2 import LabelSelectorOperator  # type: ignore[attr-defined] # made by protobuf

from tests.k8s.renderings import rendering_of
from tests.k8s.rules.rendering import Rendering

pytestmark = pytest.mark.kubectl


class _Silent(AutoscalerEventLogger):
    def __init__(self) -> None:
        pass

    def log_cluster_scheduling_update(self, *args: Any, **kwargs: Any) -> None:
        pass


def pods_for(r: Rendering, replicas: str) -> tuple[Mapping[str, int], int]:
    """Return how many pods of each group an empty cluster would get.

    `replicas` is the key that says how many of each deployment are wanted. The second value is
    the number of replicas that no pod can hold.
    """
    metadata = {"name": "raystream", "namespace": "raystream"}
    config = AutoscalingConfig(
        autoscaling_config._derive_autoscaling_config_from_ray_cr(
            {"metadata": metadata, "spec": r.cluster}
        )
    )
    requests = [
        _request(r, deployment)
        for deployment in r.application["deployments"]
        for _ in range(deployment["autoscaling_config"][replicas])
    ]
    reply = ResourceDemandScheduler(_Silent()).schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=config.get_node_type_configs(),
            max_num_nodes=config.get_max_num_worker_nodes(),
            resource_requests=ResourceRequestUtil.group_by_count(requests),
        )
    )
    launched = {each.instance_type: each.count for each in reply.to_launch}
    infeasible = len(reply.infeasible_resource_requests)
    return launched, infeasible


def _request(r: Rendering, deployment: dict[str, Any]) -> Any:
    entries = {each["id"]: each for each in r.application["args"]["models"]}
    name = deployment["name"]
    options = deployment.get("ray_actor_options") or {"num_cpus": entries[name]["num_cpus"]}
    resources = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0)}
    if limit := deployment.get("max_replicas_per_node"):
        # So Serve says it: each node has one of a resource that no node names.
        resources[f"{IMPLICIT_RESOURCE_PREFIX}raystream:{name}"] = 1 / limit
    is_in = LabelSelectorOperator.LABEL_OPERATOR_IN
    selector = [(key, is_in, [value]) for key, value in options.get("label_selector", {}).items()]
    return ResourceRequestUtil.make(
        {key: value for key, value in resources.items() if value},
        label_selectors=[selector] if selector else None,
    )


@pytest.mark.parametrize("name", ["gpu-multi", "gke"])
def test_the_first_replica_brings_the_first_gpu_node_from_zero(name: str) -> None:
    launched, infeasible = pods_for(rendering_of(name), "min_replicas")
    assert infeasible == 0
    assert launched == {"workers": 2, "gpu-workers": 1}


@pytest.mark.parametrize(
    ("name", "gpu_pods"),
    [("gpu-single", 1), ("gpu-shared", 1), ("gpu-multi", 4), ("eks", 1), ("gke", 4),
     ("inference-gateway", 4), ("gpu-vllm", 1)],
)  # fmt: skip
def test_all_replicas_that_may_be_find_a_pod(name: str, gpu_pods: int) -> None:
    launched, infeasible = pods_for(rendering_of(name), "max_replicas")
    assert infeasible == 0
    assert launched["gpu-workers"] == gpu_pods


def test_models_without_a_gpu_fit_on_the_workers_of_the_cpu_overlay() -> None:
    launched, infeasible = pods_for(rendering_of("cpu"), "max_replicas")
    assert infeasible == 0
    assert launched == {"workers": 2}


def test_each_replica_of_a_model_brings_a_worker_of_its_own() -> None:
    sound = rendering_of("cpu")
    config = sound.service["spec"]["serveConfigV2"].replace(
        "max_replicas: 1\n", "max_replicas: 3\n"
    )
    service = {**sound.service, "spec": {**sound.service["spec"], "serveConfigV2": config}}
    launched, infeasible = pods_for(Rendering("three replicas", [service]), "max_replicas")
    assert infeasible == 0
    assert launched == {"workers": 3}


def test_a_label_that_no_group_has_is_never_satisfied() -> None:
    sound = rendering_of("gke")
    text = sound.service["spec"]["serveConfigV2"].replace("a100-40gb", "h100")
    service = {**sound.service, "spec": {**sound.service["spec"], "serveConfigV2": text}}
    spoilt = Rendering("spoilt", [service])
    assert pods_for(spoilt, "min_replicas")[1] == 1
