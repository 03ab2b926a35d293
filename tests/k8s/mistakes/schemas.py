"""Mistakes that the API server's strict decoding refuses, if its schemas are right."""

from tests.k8s.mistakes.mistake import Mistake, container_of
from tests.k8s.rules.rendering import Rendering


def _mistyped_key(r: Rendering) -> None:
    r.service["spec"]["rayClusterDeletionDelaySecond"] = r.service["spec"].pop(
        "rayClusterDeletionDelaySeconds"
    )


def _mistyped_pod_key(r: Rendering) -> None:
    container_of(r, "head")["enviromentFrom"] = []


def _text_for_a_number(r: Rendering) -> None:
    r.cluster["workerGroupSpecs"][0]["minReplicas"] = "two"


def _mistyped_policy_key(r: Rendering) -> None:
    policy = r.named("NetworkPolicy")["raystream"]
    policy["spec"]["ingres"] = policy["spec"].pop("ingress")


def _mistyped_route_key(r: Rendering) -> None:
    (route,) = r.of_kind("HTTPRoute")
    route["spec"]["rules"][0]["backendRef"] = route["spec"]["rules"][0].pop("backendRefs")


MISTAKES = (
    Mistake("a mistyped key of the RayService", "cpu", _mistyped_key, None),
    Mistake("a mistyped key of a pod", "cpu", _mistyped_pod_key, None),
    Mistake("a word for a number", "cpu", _text_for_a_number, None),
    Mistake("a mistyped key of a core kind", "cpu", _mistyped_policy_key, None),
    Mistake("a mistyped key of a route", "cpu+gateway", _mistyped_route_key, None),
)  # fmt: skip
