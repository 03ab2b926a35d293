"""Mistakes in serveConfigV2, and in the workers that run it."""

from tests.k8s.mistakes.mistake import Mistake, container_of, replace_in_config, template_of
from tests.k8s.rules import serving
from tests.k8s.rules.rendering import Rendering


def _mistyped_scaling_key(r: Rendering) -> None:
    replace_in_config(r, "autoscaling_config", "autoscaling_confg")


def _no_time_for_a_successor(r: Rendering) -> None:
    replace_in_config(r, "graceful_shutdown_timeout_s: 240", "graceful_shutdown_timeout_s: 300")


def _head_only(r: Rendering) -> None:
    replace_in_config(r, "proxy_location: EveryNode", "proxy_location: HeadOnly")


def _auto_gpus(r: Rendering) -> None:
    replace_in_config(r, "num_gpus: 1\n      gpu_share", "num_gpus: auto\n      gpu_share")


def _together(r: Rendering) -> None:
    replace_in_config(r, "max_replicas_per_node: 1", "max_replicas_per_node: null")


def _more_replicas_than_workers(r: Rendering) -> None:
    replace_in_config(r, "max_replicas: 1", "max_replicas: 5")


def _no_such_kind_of_node(r: Rendering) -> None:
    replace_in_config(r, "node-kind: a100-40gb", "node-kind: a100-80gb")


def _too_much_for_a_card(r: Rendering) -> None:
    replace_in_config(
        r, "num_gpus: 0.1\n      label_selector", "num_gpus: 0.2\n      label_selector"
    )


def _no_toleration(r: Rendering) -> None:
    template_of(r, "gpu-workers")["spec"].pop("tolerations")


def _ingress_on_a_gpu_node(r: Rendering) -> None:
    replace_in_config(r, "node-kind: cpu", "node-kind: a100-40gb")


def _branch_for_commit(r: Rendering) -> None:
    replace_in_config(r, "revision: 4ff1f23a69a36aa1df47b0933be6279f1b896c9b", "revision: main")


def _online_servers(r: Rendering) -> None:
    container = container_of(r, "gpu-workers")
    container["env"] = [each for each in container["env"] if each["name"] != "HF_HUB_OFFLINE"]


def _two_replicas_in_a_pod(r: Rendering) -> None:
    replace_in_config(r, "num_gpus: 1\n      label_selector", "num_gpus: 0.5\n      label_selector")


def _patched_service_only(r: Rendering) -> None:
    spec = r.service["spec"]
    spec["serveConfigV2"] = spec["serveConfigV2"].replace("access_log: true", "access_log: false")


MISTAKES = (
    Mistake(
        "a mistyped key in serveConfigV2: Ray ignores it",
        "cpu", _mistyped_scaling_key, serving.serve_configuration_has_no_problem,
    ),
    Mistake(
        "replicas that may take as long as the node's drain: Serve ends them at once",
        "cpu", _no_time_for_a_successor, serving.replicas_drain_while_their_successors_start,
    ),
    Mistake(
        "proxy_location HeadOnly: workers never get ready",
        "cpu", _head_only, serving.serve_listens_where_service_and_kubelet_reach_it,
    ),
    Mistake(
        "num_gpus: auto where GPU nodes start from zero: the model runs on a CPU",
        "gke", _auto_gpus, serving.models_on_gpus_say_how_much_and_which,
    ),
    Mistake(
        "replicas of a model that may share a worker, which takes all of them with it",
        "cpu", _together, serving.a_lost_worker_takes_one_replica_of_a_model,
    ),
    Mistake(
        "more replicas than workers: one waits for ever",
        "cpu", _more_replicas_than_workers, serving.a_lost_worker_takes_one_replica_of_a_model,
    ),
    Mistake(
        "a label that no group has: the model waits for ever",
        "gke", _no_such_kind_of_node, serving.deployments_find_nodes_with_their_label,
    ),
    Mistake(
        "shares that exceed the card",
        "gpu-shared", _too_much_for_a_card, serving.cards_hold_the_models_that_are_put_on_them,
    ),
    Mistake(
        "GPU pods that the nodes' taint keeps away",
        "eks", _no_toleration, serving.gpu_pods_tolerate_the_taint_of_gpu_nodes,
    ),
    Mistake(
        "an ingress on a GPU node, which its streams hold while it drains",
        "gpu-multi", _ingress_on_a_gpu_node, serving.ingresses_stay_off_gpu_nodes,
    ),
    Mistake(
        "weights by a branch's name",
        "gpu-multi", _branch_for_commit, serving.weights_are_pinned_and_read_from_the_cache,
    ),
    Mistake(
        "servers that ask the hub",
        "gpu-single", _online_servers, serving.weights_are_pinned_and_read_from_the_cache,
    ),
    Mistake(
        "two replicas in a pod of the endpoint picker",
        "inference-gateway", _two_replicas_in_a_pod, serving.a_picker_s_pod_is_one_replica,
    ),
    Mistake(
        "serveConfigV2 patched by itself: the download reads another configuration",
        "gpu-single", _patched_service_only, serving.the_config_map_is_what_is_served,
    ),
)  # fmt: skip
