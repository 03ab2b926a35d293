"""A planted mistake, and the parts of a rendering that mistakes change."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.k8s.manifests import Manifest
from tests.k8s.rules.rendering import Rendering, Rule


@dataclass(frozen=True, slots=True)
class Mistake:
    """A small edit of a rendering."""

    name: str  # what was done wrong, and what would happen
    where: str  # the rendering that it is planted in
    plant: Callable[[Rendering], None]  # makes it
    rule: Rule | None  # what must catch it; None: the API server's schemas


Plant = Callable[[Rendering], None]
MISTAKES: list[Mistake] = []
"""All that the files of this folder hold."""


def mistake(name: str, where: str, rule: Rule | None = None) -> Callable[[Plant], Plant]:
    """Add the mistake that the decorated function makes."""

    def added(plant: Plant) -> Plant:
        MISTAKES.append(Mistake(name, where, plant, rule))
        return plant

    return added


def in_config(name: str, where: str, old: str, new: str, rule: Rule) -> None:
    """Add a mistake in the Serve configuration: a text in place of another."""
    mistake(name, where, rule)(lambda r: _replace_in_config(r, old, new))


def group_of(r: Rendering, name: str) -> dict[str, Any]:
    """Return `head` or a group of workers."""
    groups = {each["groupName"]: each for each in r.cluster["workerGroupSpecs"]}
    found: dict[str, Any] = {"head": r.cluster["headGroupSpec"], **groups}[name]
    return found


def template_of(r: Rendering, group: str) -> Manifest:
    """Return the pod template of a group."""
    template: Manifest = group_of(r, group)["template"]
    return template


def container_of(r: Rendering, group: str) -> dict[str, Any]:
    """Return Ray's container in a group's pods."""
    container: dict[str, Any] = template_of(r, group)["spec"]["containers"][0]
    return container


def _replace_in_config(r: Rendering, old: str, new: str) -> None:
    """Change the Serve configuration, and the ConfigMap that it comes from."""
    text = r.service["spec"]["serveConfigV2"]
    assert old in text, old
    text = text.replace(old, new, 1)
    r.service["spec"]["serveConfigV2"] = text
    r.named("ConfigMap")["raystream-serve-config"]["data"]["serve_config.yaml"] = text
