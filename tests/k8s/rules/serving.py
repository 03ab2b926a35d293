"""Rules for serveConfigV2 and the workers that run it: models, GPUs, weights."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from k8s.make_base import ROOT, STREAMS_S
from serve_app.commands.check.check import find_problems
from serve_app.config import INGRESS_NAME
from tests.k8s.manifests import Manifest
from tests.k8s.rules.rendering import Rendering, Rule, env_of, ray_container

GPU = "nvidia.com/gpu"
MODEL_CACHE = "/models"

START_S = 60
"""What a replica's successor may need to start. Weights of a large model take longer; then requests
wait for it."""


def serve_configuration_has_no_problem(r: Rendering) -> Iterator[str]:
    yield from find_problems(r.service["spec"]["serveConfigV2"])


def the_config_map_is_what_is_served(r: Rendering) -> Iterator[str]:
    data = r.named("ConfigMap")["raystream-serve-config"]["data"]["serve_config.yaml"]
    if data != r.service["spec"]["serveConfigV2"]:
        yield "serveConfigV2 is not the ConfigMap's, which the download reads"


def serve_listens_where_service_and_kubelet_reach_it(r: Rendering) -> Iterator[str]:
    if r.serve["proxy_location"] != "EveryNode":
        yield f"proxy_location {r.serve['proxy_location']}: workers never get ready"
    if r.serve["http_options"] != {"host": "0.0.0.0", "port": 8000}:
        yield f"http_options {r.serve['http_options']}"


def replicas_drain_while_their_successors_start(r: Rendering) -> Iterator[str]:
    """Else Serve ends a replica on a node that drains before another one runs."""
    (environment,) = (m for m in r.of_kind("ConfigMap") if "-env-" in m["metadata"]["name"])
    drain_s = int(environment["data"]["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    for deployment in r.application["deployments"]:
        streams_s = deployment.get("graceful_shutdown_timeout_s", 20)
        if streams_s < STREAMS_S:
            yield f"{deployment['name']}: cuts streams after {streams_s} s"
        if drain_s - streams_s < START_S:
            yield f"{deployment['name']}: ends {drain_s - streams_s} s before the drain does"


def a_lost_worker_takes_one_replica_of_a_model(r: Rendering) -> Iterator[str]:
    """Serve's own placement counts no model: it may put all replicas of one on one worker."""
    for deployment in r.application["deployments"]:
        name, limit = deployment["name"], deployment.get("max_replicas_per_node")
        if name != INGRESS_NAME and limit != 1:
            yield f"{name}: all replicas may run on one worker"
        num_pods = sum(group["maxReplicas"] for group in _groups_of(r, deployment))
        if limit and deployment["autoscaling_config"]["max_replicas"] > limit * num_pods:
            yield f"{name}: more replicas than {num_pods} workers may hold"


def deployments_find_nodes_with_their_label(r: Rendering) -> Iterator[str]:
    for deployment in r.application["deployments"]:
        if not _groups_of(r, deployment):
            yield f"{deployment['name']}: no group has the labels {_selector_of(deployment)}"


def models_on_gpus_say_how_much_and_which(r: Rendering) -> Iterator[str]:
    """With `auto` a model would get no GPU as long as no GPU node runs."""
    if not _gpu_groups(r):
        return
    entries = {entry["id"]: entry for entry in r.application["args"]["models"]}
    for name, options in _model_options(r).items():
        if not isinstance(entries[name]["num_gpus"], int | float):
            yield f"{name}: num_gpus is {entries[name]['num_gpus']!r}, not a number"
        if options.get("num_gpus") != entries[name]["num_gpus"]:
            yield f"{name}: its entry and its deployment differ in num_gpus"
        if "node-kind" not in options.get("label_selector", {}):
            yield f"{name}: may land on any kind of GPU"


def cards_hold_the_models_that_are_put_on_them(r: Rendering) -> Iterator[str]:
    shares: dict[str, float] = defaultdict(float)
    most: dict[str, float] = defaultdict(float)
    deployments = {each["name"]: each for each in r.application["deployments"]}
    for name, options in _model_options(r).items():
        kind = options.get("label_selector", {}).get("node-kind", "")
        scaling = deployments[name]["autoscaling_config"]
        shares[kind] += options.get("num_gpus", 0)
        most[kind] += options.get("num_gpus", 0) * scaling["max_replicas"]
    for group, pod in _gpu_groups(r):
        kind = group.get("labels", {}).get("node-kind", "")
        num = int(ray_container(pod)["resources"]["limits"][GPU])
        if shares[kind] > num:
            yield f"{group['groupName']}: models take {shares[kind]:g} of {num} GPU"
        if most[kind] > num * group["maxReplicas"]:
            yield f"{group['groupName']}: {group['maxReplicas']} pods for {most[kind]:g} GPUs"
        if most[kind] <= num * (group["maxReplicas"] - 1):
            yield f"{group['groupName']}: more pods than the models ever fill"


def gpu_pods_tolerate_the_taint_of_gpu_nodes(r: Rendering) -> Iterator[str]:
    for group, pod in _gpu_groups(r):
        taints = {each.get("key") for each in pod["spec"].get("tolerations", ())}
        if GPU not in taints:
            yield f"{group['groupName']}: GPU nodes refuse its pods"
        resources = ray_container(pod)["resources"]
        if resources.get("requests", {}).get(GPU) != resources["limits"][GPU]:
            yield f"{group['groupName']}: requests and limits differ in GPUs"


def ingresses_stay_off_gpu_nodes(r: Rendering) -> Iterator[str]:
    if not _gpu_groups(r):
        return
    (ingress,) = (each for each in r.application["deployments"] if each["name"] == INGRESS_NAME)
    if ingress["ray_actor_options"].get("label_selector") != {"node-kind": "cpu"}:
        yield "an ingress may hold a GPU node back while its streams run"
    (group,) = (g for g in r.cluster["workerGroupSpecs"] if g["groupName"] == "workers")
    if ingress["autoscaling_config"]["max_replicas"] >= group["maxReplicas"]:
        yield "no node for the next ingress when a roll-out begins at full scale"


def weights_are_pinned_and_read_from_the_cache(r: Rendering) -> Iterator[str]:
    hub = [m for m in r.application["args"]["models"] if not (ROOT / m["source"]).is_dir()]
    for model in hub:
        if not re.fullmatch(r"[0-9a-f]{40}", str(model["revision"])):
            yield f"{model['id']}: revision {model['revision']!r} is no commit"
    for group, pod in _gpu_groups(r) if hub else ():
        container, name = ray_container(pod), group["groupName"]
        if env_of(container).get("HF_HUB_OFFLINE") != "1":
            yield f"{name}: would ask the hub at each start"
        if env_of(container).get("HF_HUB_CACHE") != MODEL_CACHE:
            yield f"{name}: looks for weights elsewhere"
        mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
        if mounts.get(MODEL_CACHE, {}).get("readOnly") is not True:
            yield f"{name}: the cache is not there, or can be written"
        commands = [each.get("command") for each in pod["spec"].get("initContainers", ())]
        if not any(command and "--wait" in command for command in commands):
            yield f"{name}: starts before the weights are there"


def a_picker_s_pod_is_one_replica(r: Rendering) -> Iterator[str]:
    for pool in r.of_kind("InferencePool"):
        selector = pool["spec"]["selector"]["matchLabels"]
        own = {key: value for key, value in selector.items() if key != "ray.io/serve"}
        pods = [pod for pod in r.ray_pods if own.items() <= pod["metadata"]["labels"].items()]
        if [pod["metadata"]["name"] for pod in pods] != ["gpu-workers"]:
            yield f"the pool selects {[pod['metadata']['name'] for pod in pods]}"
        for pod in pods:
            if pod["metadata"]["labels"].get("llm-d.ai/engine-type") != "raystream":
                yield "the picker reads other metrics of these pods"
        for name, options in _model_options(r).items():
            if options["num_gpus"] != 1:
                yield f"{name}: several replicas fit into a pod"


def _selector_of(deployment: dict[str, Any]) -> dict[str, str]:
    selector: dict[str, str] = deployment.get("ray_actor_options", {}).get("label_selector", {})
    return selector


def _groups_of(r: Rendering, deployment: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of workers on which a deployment's replicas may run."""
    selector = _selector_of(deployment).items()
    groups = r.cluster["workerGroupSpecs"]
    return [group for group in groups if selector <= group.get("labels", {}).items()]


def _gpu_groups(r: Rendering) -> list[tuple[dict[str, Any], Manifest]]:
    pairs = zip(r.cluster["workerGroupSpecs"], r.workers, strict=True)
    return [
        (group, pod)
        for group, pod in pairs
        if GPU in ray_container(pod).get("resources", {}).get("limits", {})
    ]


def _model_options(r: Rendering) -> dict[str, dict[str, Any]]:
    return {
        each["name"]: each.get("ray_actor_options", {})
        for each in r.application["deployments"]
        if each["name"] != INGRESS_NAME
    }


RULES: tuple[Rule, ...] = (
    serve_configuration_has_no_problem,
    the_config_map_is_what_is_served,
    serve_listens_where_service_and_kubelet_reach_it,
    replicas_drain_while_their_successors_start,
    a_lost_worker_takes_one_replica_of_a_model,
    deployments_find_nodes_with_their_label,
    models_on_gpus_say_how_much_and_which,
    cards_hold_the_models_that_are_put_on_them,
    gpu_pods_tolerate_the_taint_of_gpu_nodes,
    ingresses_stay_off_gpu_nodes,
    weights_are_pinned_and_read_from_the_cache,
    a_picker_s_pod_is_one_replica,
)
