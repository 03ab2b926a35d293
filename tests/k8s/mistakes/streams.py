"""Mistakes by which a proxy in front cuts streams or holds events back."""

from tests.k8s.mistakes.mistake import mistake
from tests.k8s.rules import streams
from tests.k8s.rules.rendering import Rendering


@mistake(
    "an nginx that collects the answer",
    "cpu+ingress-nginx",
    streams.nginx_passes_events_on_and_waits,
)
def _nginx_buffers(r: Rendering) -> None:
    annotations = r.named("Ingress")["raystream"]["metadata"]["annotations"]
    annotations.pop("nginx.ingress.kubernetes.io/proxy-buffering")


@mistake(
    "an nginx that gives up after a minute",
    "cpu+ingress-nginx",
    streams.nginx_passes_events_on_and_waits,
)
def _nginx_gives_up(r: Rendering) -> None:
    annotations = r.named("Ingress")["raystream"]["metadata"]["annotations"]
    annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"] = "60"


@mistake(
    "a gateway without a policy for streams",
    "incremental-upgrade",
    streams.gateways_have_a_policy_for_streams,
)
def _no_policy_for_streams(r: Rendering) -> None:
    r.manifests.remove(r.named("BackendTrafficPolicy")["raystream-streams"])


@mistake("Google's 30 s for an answer", "gke", streams.gateways_have_a_policy_for_streams)
def _thirty_seconds(r: Rendering) -> None:
    (policy,) = r.of_kind("GCPBackendPolicy")
    policy["spec"]["default"].pop("timeoutSec")


@mistake("Amazon's 60 s without a byte", "eks", streams.amazon_s_load_balancer_waits)
def _sixty_seconds(r: Rendering) -> None:
    annotations = r.named("Ingress")["raystream"]["metadata"]["annotations"]
    annotations.pop("alb.ingress.kubernetes.io/load-balancer-attributes")


@mistake(
    "a route that cuts answers after five minutes", "cpu+gateway", streams.routes_set_no_timeout
)
def _timeout_of_a_route(r: Rendering) -> None:
    (route,) = r.of_kind("HTTPRoute")
    route["spec"]["rules"][0]["timeouts"]["request"] = "5m"
