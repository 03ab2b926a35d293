"""Mistakes that the API server's strict decoding refuses, if its schemas are right."""

from tests.k8s.mistakes.mistake import container_of, mistake
from tests.k8s.rules.rendering import Rendering


@mistake("a mistyped key of the RayService", "cpu")
def _mistyped_key(r: Rendering) -> None:
    r.service["spec"]["rayClusterDeletionDelaySecond"] = r.service["spec"].pop(
        "rayClusterDeletionDelaySeconds"
    )


@mistake("a mistyped key of a pod", "cpu")
def _mistyped_pod_key(r: Rendering) -> None:
    container_of(r, "head")["enviromentFrom"] = []


@mistake("a word for a number", "cpu")
def _text_for_a_number(r: Rendering) -> None:
    r.cluster["workerGroupSpecs"][0]["minReplicas"] = "two"


@mistake("a mistyped key of a core kind", "cpu")
def _mistyped_policy_key(r: Rendering) -> None:
    policy = r.named("NetworkPolicy")["raystream"]
    policy["spec"]["ingres"] = policy["spec"].pop("ingress")


@mistake("a mistyped key of a route", "cpu+gateway")
def _mistyped_route_key(r: Rendering) -> None:
    (route,) = r.of_kind("HTTPRoute")
    route["spec"]["rules"][0]["backendRef"] = route["spec"]["rules"][0].pop("backendRefs")
