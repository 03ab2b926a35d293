"""Mistakes that open ports, or keep those out who need them."""

from tests.k8s.mistakes.mistake import Mistake, template_of
from tests.k8s.rules import network
from tests.k8s.rules.rendering import Rendering


def _dashboard_open(r: Rendering) -> None:
    policy = r.named("NetworkPolicy")["raystream"]
    policy["spec"]["ingress"][0]["ports"].append({"protocol": "TCP", "port": 8265})


def _operator_from_anywhere(r: Rendering) -> None:
    policy = r.named("NetworkPolicy")["raystream"]
    policy["spec"]["ingress"][2]["from"] = [{"namespaceSelector": {}}]


def _policy_of_other_pods(r: Rendering) -> None:
    template_of(r, "gpu-workers")["metadata"]["labels"].pop("app.kubernetes.io/part-of")


def _way_out(r: Rendering) -> None:
    r.named("NetworkPolicy")["raystream-offline"]["spec"]["egress"].append({})


def _worker_with_a_way_out(r: Rendering) -> None:
    spec = r.named("NetworkPolicy")["raystream-offline"]["spec"]
    spec["podSelector"]["matchExpressions"][0]["values"] = ["worker"]


def _prometheus_kept_out(r: Rendering) -> None:
    r.manifests.remove(r.named("NetworkPolicy")["raystream-metrics"])


def _another_namespace(r: Rendering) -> None:
    r.named("NetworkPolicy")["raystream"]["metadata"]["namespace"] = "default"


MISTAKES = (
    Mistake(
        "the dashboard open to all: others run code",
        "cpu", _dashboard_open, network.only_the_serve_port_is_open_to_others,
    ),
    Mistake(
        "any pod taken for the operator",
        "cpu", _operator_from_anywhere, network.only_the_serve_port_is_open_to_others,
    ),
    Mistake(
        "GPU pods that no network policy selects",
        "gpu-multi", _policy_of_other_pods, network.policies_select_every_ray_pod,
    ),
    Mistake(
        "servers that reach the internet",
        "gpu-single", _way_out, network.servers_with_a_cache_of_models_have_no_way_out,
    ),
    Mistake(
        "a policy of the way out that leaves GPU workers out",
        "gpu-single", _worker_with_a_way_out,
        network.servers_with_a_cache_of_models_have_no_way_out,
    ),
    Mistake(
        "Prometheus kept out by the network policy",
        "cpu+monitoring", _prometheus_kept_out, network.prometheus_reaches_what_is_scraped,
    ),
    Mistake(
        "a policy in another namespace, where it closes no port of ours",
        "cpu", _another_namespace, network.all_namespaced_objects_are_in_one_namespace,
    ),
)  # fmt: skip
