"""Rules for network access: policies, and what is in front of the Service."""

from collections.abc import Iterator, Mapping
from typing import Any

from tests.k8s.manifests import Manifest
from tests.k8s.rules.rendering import Rendering, Rule

SERVE, DASHBOARD, METRICS = 8000, 8265, 8080
OPERATOR = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kuberay-system"}},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
}
OWN_PODS = {"podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "raystream"}}}
PICKER = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "raystream-endpoint-picker"}}}
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def only_the_serve_port_is_open_to_others(r: Rendering) -> Iterator[str]:
    """Every other rule names its peers, and every peer is one of the four that need a port."""
    for name, rule in _rules(r, "ingress"):
        ports = sorted(port["port"] for port in rule.get("ports", ()))
        peers = rule.get("from")
        if not peers:
            if ports != [SERVE]:
                yield f"{name}: {ports or 'every port'} open to all"
            continue
        for peer in peers:
            allowed = {
                str(OPERATOR): [DASHBOARD],
                str(PICKER): [METRICS],
                str(MONITORING): [METRICS],
                str(OWN_PODS): [],
            }.get(str(_sorted(peer)))
            if allowed is None or allowed != ports:
                yield f"{name}: {peer} reaches {ports or 'every port'}"


def policies_select_every_ray_pod(r: Rendering) -> Iterator[str]:
    policies = r.named("NetworkPolicy")
    base = policies.get("raystream")
    if base is None or base["spec"].get("policyTypes") != ["Ingress"]:
        yield "no policy closes the pods' ports"
        return
    for pod in r.ray_pods:
        labels = pod["metadata"]["labels"].items()
        if not base["spec"]["podSelector"]["matchLabels"].items() <= labels:
            yield f"{pod['metadata']['name']}: no policy closes its ports"


def servers_with_a_cache_of_models_have_no_way_out(r: Rendering) -> Iterator[str]:
    if "raystream-models" not in r.named("PersistentVolumeClaim"):
        return
    rules = list(_rules(r, "egress"))
    if not rules:
        yield "servers may reach the internet"
    for name, rule in rules:
        ports = {port["port"] for port in rule.get("ports", ())}
        if rule.get("to", [None]) != [OWN_PODS] and ports != {53}:
            yield f"{name}: servers reach {rule}"
    closing = [
        p["spec"] for p in r.of_kind("NetworkPolicy") if "Egress" in p["spec"]["policyTypes"]
    ]
    for pod in r.workers:
        if not any(_selects(spec["podSelector"], pod["metadata"]["labels"]) for spec in closing):
            yield f"{pod['metadata']['name']}: no policy closes its way out"


def prometheus_reaches_what_is_scraped(r: Rendering) -> Iterator[str]:
    if not r.of_kind("PodMonitor"):
        return
    peers = [
        peer
        for _, rule in _rules(r, "ingress")
        if any(port["port"] == METRICS for port in rule.get("ports", ()))
        for peer in rule.get("from", ())
    ]
    if MONITORING not in peers:
        yield "the network policy keeps Prometheus out"
    ports = {port["name"] for pod in r.ray_pods for port in pod["spec"]["containers"][0]["ports"]}
    for monitor in r.of_kind("PodMonitor"):
        named = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        if not named <= ports:
            yield f"no pod has a port {named - ports}"


def all_namespaced_objects_are_in_one_namespace(r: Rendering) -> Iterator[str]:
    for each in r.manifests:
        namespace = each["metadata"].get("namespace")
        if each["kind"] != "PriorityClass" and namespace != "raystream":
            yield f"{each['kind']} {each['metadata']['name']} is in {namespace}"


def _selects(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Return whether a selector means a pod; of its expressions only `In` is in use."""
    expressions = selector.get("matchExpressions", ())
    assert all(each["operator"] == "In" for each in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


def _rules(r: Rendering, direction: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for policy in r.of_kind("NetworkPolicy"):
        for rule in policy["spec"].get(direction, ()):
            yield policy["metadata"]["name"], rule


def _sorted(peer: Manifest) -> Manifest:
    return dict(sorted(peer.items()))


RULES: tuple[Rule, ...] = (
    only_the_serve_port_is_open_to_others,
    policies_select_every_ray_pod,
    servers_with_a_cache_of_models_have_no_way_out,
    prometheus_reaches_what_is_scraped,
    all_namespaced_objects_are_in_one_namespace,
)
