"""Mistakes in serveConfigV2, and in the workers that run it."""

from tests.k8s.mistakes.mistake import container_of, in_config, mistake, template_of
from tests.k8s.rules import serving
from tests.k8s.rules.rendering import Rendering, Rule


@mistake(
    "GPU pods that the nodes' taint keeps away",
    "eks",
    serving.gpu_pods_tolerate_the_taint_of_gpu_nodes,
)
def _no_toleration(r: Rendering) -> None:
    template_of(r, "gpu-workers")["spec"].pop("tolerations")


@mistake(
    "servers that ask the hub", "gpu-single", serving.weights_are_pinned_and_read_from_the_cache
)
def _online_servers(r: Rendering) -> None:
    container = container_of(r, "gpu-workers")
    container["env"] = [each for each in container["env"] if each["name"] != "HF_HUB_OFFLINE"]


@mistake(
    "serveConfigV2 patched by itself: the download reads another configuration",
    "gpu-single",
    serving.the_config_map_is_what_is_served,
)
def _patched_service_only(r: Rendering) -> None:
    spec = r.service["spec"]
    spec["serveConfigV2"] = spec["serveConfigV2"].replace("access_log: true", "access_log: false")


TEXTS: tuple[tuple[str, str, str, str, Rule], ...] = (
    ("a mistyped key in serveConfigV2: Ray ignores it",
     "cpu", "autoscaling_config", "autoscaling_confg",
     serving.serve_configuration_has_no_problem),
    ("replicas that may take as long as the node's drain: Serve ends them at once",
     "cpu", "graceful_shutdown_timeout_s: 240", "graceful_shutdown_timeout_s: 300",
     serving.replicas_drain_while_their_successors_start),
    ("proxy_location HeadOnly: workers never get ready",
     "cpu", "proxy_location: EveryNode", "proxy_location: HeadOnly",
     serving.serve_listens_where_service_and_kubelet_reach_it),
    ("num_gpus: auto where GPU nodes start from zero: the model runs on a CPU",
     "gke", "num_gpus: 1\n      gpu_share", "num_gpus: auto\n      gpu_share",
     serving.models_on_gpus_say_how_much_and_which),
    ("replicas of a model that may share a worker, which takes all of them with it",
     "cpu", "max_replicas_per_node: 1", "max_replicas_per_node: null",
     serving.a_lost_worker_takes_one_replica_of_a_model),
    ("more replicas than workers: one waits for ever",
     "cpu", "max_replicas: 1", "max_replicas: 5",
     serving.a_lost_worker_takes_one_replica_of_a_model),
    ("a label that no group has: the model waits for ever",
     "gke", "node-kind: a100-40gb", "node-kind: a100-80gb",
     serving.deployments_find_nodes_with_their_label),
    ("shares that exceed the card",
     "gpu-shared", "num_gpus: 0.1\n      label_selector", "num_gpus: 0.2\n      label_selector",
     serving.cards_hold_the_models_that_are_put_on_them),
    ("an ingress on a GPU node, which its streams hold while it drains",
     "gpu-multi", "node-kind: cpu", "node-kind: a100-40gb",
     serving.ingresses_stay_off_gpu_nodes),
    ("weights by a branch's name",
     "gpu-multi", "revision: 4ff1f23a69a36aa1df47b0933be6279f1b896c9b", "revision: main",
     serving.weights_are_pinned_and_read_from_the_cache),
    ("two replicas in a pod of the endpoint picker",
     "inference-gateway",
     "num_gpus: 1\n      label_selector", "num_gpus: 0.5\n      label_selector",
     serving.a_picker_s_pod_is_one_replica),
)  # fmt: skip
for told in TEXTS:
    in_config(*told)
