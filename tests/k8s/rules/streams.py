"""Rules for what stands between clients and pods: it neither holds events back nor cuts answers."""

import re
from collections.abc import Iterator
from typing import Any

from tests.k8s.manifests import Manifest
from tests.k8s.rules.rendering import Rendering, Rule

NGINX = "nginx.ingress.kubernetes.io/"
ALB = "alb.ingress.kubernetes.io/"
UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
SIZES = {"k": 2**10, "m": 2**20, "g": 2**30}
HEALTH = "/-/healthz"
"""Serve's proxy answers it without asking a model, and not while its node drains."""


def nginx_passes_events_on_and_waits(r: Rendering) -> Iterator[str]:
    for ingress in r.of_kind("Ingress"):
        if ingress["spec"]["ingressClassName"] != "nginx":
            continue
        notes = ingress["metadata"].get("annotations", {})
        if notes.get(f"{NGINX}proxy-buffering") != "off":
            yield "nginx collects answers before it passes them on"
        if int(notes.get(f"{NGINX}proxy-read-timeout", 60)) < r.limits["total_timeout_s"]:
            yield "nginx gives up before the server"
        if notes.get(f"{NGINX}proxy-http-version", "1.1") != "1.1":
            yield "HTTP/1.0 has no chunks"
        if _bytes(notes.get(f"{NGINX}proxy-body-size", "1m")) <= r.limits["max_body_bytes"]:
            yield "nginx refuses bodies that the server takes"
        if "non_idempotent" in notes.get(f"{NGINX}proxy-next-upstream", ""):
            yield "nginx sends a prompt twice"
        if "tls" not in ingress["spec"]:
            yield "keys cross the network as plain text"


def amazon_s_load_balancer_waits(r: Rendering) -> Iterator[str]:
    for ingress in r.of_kind("Ingress"):
        if ingress["spec"]["ingressClassName"] != "alb":
            continue
        notes = ingress["metadata"].get("annotations", {})
        idle = re.search(
            r"idle_timeout\.timeout_seconds=(\d+)", notes.get(f"{ALB}load-balancer-attributes", "")
        )
        if idle is None or int(idle[1]) < r.limits["total_timeout_s"]:
            yield "the load balancer gives up before the server"
        if notes.get(f"{ALB}healthcheck-path") != HEALTH:
            yield "the health check does not ask the proxy"
        if "HTTP" in re.findall(r"HTTPS?", notes.get(f"{ALB}listen-ports", "HTTP")):
            yield "keys cross the network as plain text"


def routes_set_no_timeout(r: Rendering) -> Iterator[str]:
    for route in r.of_kind("HTTPRoute"):
        for rule in route["spec"]["rules"]:
            for name, value in rule.get("timeouts", {}).items():
                if 0 < _seconds(value) < r.limits["total_timeout_s"]:
                    yield f"the route cuts answers: {name} {value}"


def gateways_have_a_policy_for_streams(r: Rendering) -> Iterator[str]:
    """Each kind of gateway cuts streams unless its own policy object says otherwise."""
    classes = [each["spec"]["gatewayClassName"] for each in r.of_kind("Gateway")]
    options = r.service["spec"]["upgradeStrategy"].get("clusterUpgradeOptions", {})
    classes += [options["gatewayClassName"]] if "gatewayClassName" in options else []
    for name in classes:
        kind = "GCPBackendPolicy" if name.startswith("gke-") else "BackendTrafficPolicy"
        if not r.of_kind(kind):
            yield f"{name}: no {kind}"
    for policy in r.of_kind("BackendTrafficPolicy"):
        yield from _envoy_faults(r, policy)
    for policy in r.of_kind("GCPBackendPolicy"):
        if policy["spec"]["default"].get("timeoutSec", 30) < r.limits["total_timeout_s"]:
            yield "Google's load balancer cuts answers"
    for policy in r.of_kind("HealthCheckPolicy"):
        check = policy["spec"]["default"]["config"]["httpHealthCheck"]
        if (check["requestPath"], check["port"]) != (HEALTH, 8000):
            yield "the health check does not ask the proxy"


def _envoy_faults(r: Rendering, policy: Manifest) -> Iterator[str]:
    timeouts: dict[str, Any] = policy["spec"].get("timeout", {}).get("http", {})
    for name, default in (("requestTimeout", "15s"), ("streamIdleTimeout", "300s")):
        seconds = _seconds(timeouts.get(name, default))
        if 0 < seconds < r.limits["total_timeout_s"]:
            yield f"Envoy cuts answers: {name} {seconds:g} s"
    triggers = policy["spec"].get("retry", {}).get("retryOn", {}).get("triggers", [])
    if again := set(triggers) - {"connect-failure", "refused-stream"}:
        yield f"Envoy sends a prompt twice: {again}"


def _seconds(value: str) -> float:
    return sum(int(n) * UNITS_S[unit] for n, unit in re.findall(r"(\d+)(ms|h|m|s)", value))


def _bytes(value: str) -> int:
    match = re.fullmatch(r"(\d+)([kmg]?)", value)
    assert match is not None, value
    return int(match[1]) * SIZES.get(match[2], 1)


RULES: tuple[Rule, ...] = (
    nginx_passes_events_on_and_waits,
    amazon_s_load_balancer_waits,
    routes_set_no_timeout,
    gateways_have_a_policy_for_streams,
)
