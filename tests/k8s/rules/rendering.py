"""A rendering of k8s/, with the parts that rules ask for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from tests.k8s.manifests import Manifest, all_pods, pods_of


@dataclass(frozen=True, slots=True)
class Rendering:
    """The manifests of an overlay, by itself or with components."""

    name: str  # how tests name it
    manifests: list[Manifest]  # what `kubectl apply -k` would send
    is_local: bool = False  # whether its image comes from this machine, so that it has no digest

    def of_kind(self, *kinds: str) -> list[Manifest]:
        return [each for each in self.manifests if each["kind"] in kinds]

    def named(self, kind: str) -> dict[str, Manifest]:
        return {each["metadata"]["name"]: each for each in self.of_kind(kind)}

    @property
    def service(self) -> Manifest:
        """The RayService."""
        (manifest,) = self.of_kind("RayService")
        return manifest

    @property
    def cluster(self) -> dict[str, Any]:
        """The RayService's cluster."""
        config: dict[str, Any] = self.service["spec"]["rayClusterConfig"]
        return config

    @property
    def head(self) -> Manifest:
        return pods_of(self.service)[0]

    @property
    def workers(self) -> list[Manifest]:
        """A pod of each worker group."""
        return pods_of(self.service)[1:]

    @property
    def ray_pods(self) -> list[Manifest]:
        return pods_of(self.service)

    @property
    def pods(self) -> list[Manifest]:
        """All pods: those of Jobs and Deployments, too."""
        return all_pods(self.manifests)

    @property
    def serve(self) -> dict[str, Any]:
        """The parsed serveConfigV2; callers must not change it."""
        return _read_yaml(self.service["spec"]["serveConfigV2"])

    @property
    def application(self) -> dict[str, Any]:
        """The only application of serveConfigV2."""
        (application,) = self.serve["applications"]
        found: dict[str, Any] = application
        return found

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of requests."""
        limits: dict[str, Any] = self.application["args"]["limits"]
        return limits


@cache
def _read_yaml(text: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.load(text, Loader=yaml.CSafeLoader)
    return document


Rule = Callable[[Rendering], Iterator[str]]


def ray_container(pod: Manifest) -> dict[str, Any]:
    """Return the container that runs Ray: the first one, as KubeRay takes it."""
    container: dict[str, Any] = pod["spec"]["containers"][0]
    return container


def containers_of(pod: Manifest) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def env_of(container: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a container's own variables; those from elsewhere are None."""
    return {each["name"]: each.get("value") for each in container.get("env", ())}
