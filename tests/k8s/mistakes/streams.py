"""Mistakes by which a proxy in front cuts streams or holds events back."""

from tests.k8s.mistakes.mistake import Mistake
from tests.k8s.rules import streams
from tests.k8s.rules.rendering import Rendering


def _nginx_buffers(r: Rendering) -> None:
    annotations = r.named("Ingress")["raystream"]["metadata"]["annotations"]
    annotations.pop("nginx.ingress.kubernetes.io/proxy-buffering")


def _nginx_gives_up(r: Rendering) -> None:
    annotations = r.named("Ingress")["raystream"]["metadata"]["annotations"]
    annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"] = "60"


def _no_policy_for_streams(r: Rendering) -> None:
    r.manifests.remove(r.named("BackendTrafficPolicy")["raystream-streams"])


def _thirty_seconds(r: Rendering) -> None:
    (policy,) = r.of_kind("GCPBackendPolicy")
    policy["spec"]["default"].pop("timeoutSec")


def _sixty_seconds(r: Rendering) -> None:
    annotations = r.named("Ingress")["raystream"]["metadata"]["annotations"]
    annotations.pop("alb.ingress.kubernetes.io/load-balancer-attributes")


def _timeout_of_a_route(r: Rendering) -> None:
    (route,) = r.of_kind("HTTPRoute")
    route["spec"]["rules"][0]["timeouts"]["request"] = "5m"


MISTAKES = (
    Mistake(
        "an nginx that collects the answer",
        "cpu+ingress-nginx", _nginx_buffers, streams.nginx_passes_events_on_and_waits,
    ),
    Mistake(
        "an nginx that gives up after a minute",
        "cpu+ingress-nginx", _nginx_gives_up, streams.nginx_passes_events_on_and_waits,
    ),
    Mistake(
        "a gateway without a policy for streams",
        "incremental-upgrade", _no_policy_for_streams, streams.gateways_have_a_policy_for_streams,
    ),
    Mistake(
        "Google's 30 s for an answer",
        "gke", _thirty_seconds, streams.gateways_have_a_policy_for_streams,
    ),
    Mistake(
        "Amazon's 60 s without a byte",
        "eks", _sixty_seconds, streams.amazon_s_load_balancer_waits,
    ),
    Mistake(
        "a route that cuts answers after five minutes",
        "cpu+gateway", _timeout_of_a_route, streams.routes_set_no_timeout,
    ),
)  # fmt: skip
