"""Mistakes that open ports, or keep those out who need them."""

from tests.k8s.mistakes.mistake import mistake, template_of
from tests.k8s.rules import network
from tests.k8s.rules.rendering import Rendering


@mistake(
    "the dashboard open to all: others run code",
    "cpu",
    network.only_the_serve_port_is_open_to_others,
)
def _dashboard_open(r: Rendering) -> None:
    policy = r.named("NetworkPolicy")["raystream"]
    policy["spec"]["ingress"][0]["ports"].append({"protocol": "TCP", "port": 8265})


@mistake("any pod taken for the operator", "cpu", network.only_the_serve_port_is_open_to_others)
def _operator_from_anywhere(r: Rendering) -> None:
    policy = r.named("NetworkPolicy")["raystream"]
    policy["spec"]["ingress"][2]["from"] = [{"namespaceSelector": {}}]


@mistake(
    "GPU pods that no network policy selects", "gpu-multi", network.policies_select_every_ray_pod
)
def _policy_of_other_pods(r: Rendering) -> None:
    template_of(r, "gpu-workers")["metadata"]["labels"].pop("app.kubernetes.io/part-of")


@mistake(
    "servers that reach the internet",
    "gpu-single",
    network.servers_with_a_cache_of_models_have_no_way_out,
)
def _way_out(r: Rendering) -> None:
    r.named("NetworkPolicy")["raystream-offline"]["spec"]["egress"].append({})


@mistake(
    "a policy of the way out that leaves GPU workers out",
    "gpu-single",
    network.servers_with_a_cache_of_models_have_no_way_out,
)
def _worker_with_a_way_out(r: Rendering) -> None:
    spec = r.named("NetworkPolicy")["raystream-offline"]["spec"]
    spec["podSelector"]["matchExpressions"][0]["values"] = ["worker"]


@mistake(
    "Prometheus kept out by the network policy",
    "cpu+monitoring",
    network.prometheus_reaches_what_is_scraped,
)
def _prometheus_kept_out(r: Rendering) -> None:
    r.manifests.remove(r.named("NetworkPolicy")["raystream-metrics"])


@mistake(
    "a policy in another namespace, where it closes no port of ours",
    "cpu",
    network.all_namespaced_objects_are_in_one_namespace,
)
def _another_namespace(r: Rendering) -> None:
    r.named("NetworkPolicy")["raystream"]["metadata"]["namespace"] = "default"
