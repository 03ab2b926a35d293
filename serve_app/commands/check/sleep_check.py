"""What a file says of models that sleep: when each falls asleep, and the mistakes in it.

A replica itself reads how it is scaled (`deployments.replica.own_scaling`), since that may change
while it runs. This reads the same in the file, where model and scaling stand apart.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from deployments.contract.model_spec import ModelSpec
from serve_app.config import AppConfig

LOAD_POLICY: Final = "deployments.autoscaling:LoadPolicy"
"""The `policy_function` that reads whether a process that sleeps lightly is to stay."""

DOWNSCALE_DELAY_S: Final = 600.0
"""Serve's own `downscale_delay_s`; a plan does without Ray."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """When a model that nobody uses gives its memory back.

    Attributes:
        light_after_s: Seconds after which it sleeps lightly; None for never.
        deep_after_s: Seconds after which its process ends, of light sleep if it sleeps lightly;
            None for never, or only when memory is short.
    """

    light_after_s: float | None
    deep_after_s: float | None

    def __str__(self) -> str:
        """Return it as the end of a sentence that begins with the model; empty for never."""
        if self.light_after_s is None:
            after_s = self.deep_after_s
            return "" if after_s is None else f"ends its process after {after_s:g} s without use"
        lightly = f"sleeps lightly after {self.light_after_s:g} s without use"
        if self.deep_after_s is None:
            return lightly
        return (
            f"{lightly}, and ends its process {self.deep_after_s:g} s later, or as soon as memory "
            "is short"
        )


def sleep_of(spec: ModelSpec, section: Mapping[str, Any]) -> Sleep:
    """Return when a model sleeps.

    Args:
        spec: The model.
        section: Its section of `deployments:`, as in the file.
    """
    scaling = scaling_of(section)
    if scaling.get("min_replicas") != 0:
        return Sleep(spec.light_sleep_after_s(None), None)
    to_zero_s = scaling.get("downscale_to_zero_delay_s")
    if to_zero_s is None:
        to_zero_s = scaling.get("downscale_delay_s", DOWNSCALE_DELAY_S)
    if not _has_load_policy(section):
        return Sleep(spec.light_sleep_after_s(None), to_zero_s)
    light_after_s = spec.light_sleep_after_s(to_zero_s)
    return Sleep(
        light_after_s, to_zero_s if light_after_s is None else spec.entry.deep_sleep_after_s
    )


def sleep_problems(
    application: Mapping[str, Any], config: AppConfig, path: str = ""
) -> Iterator[str]:
    """Yield why the process of a model never ends by `deep_sleep_after_s`, though the file has it.

    Args:
        application: The application, as in the file.
        config: Its `args:`.
        path: Where it is in the file, with a dot at its end; empty if it is told alone.
    """
    sections = sections_of(application)
    for index, model in enumerate(config.models):
        if "deep_sleep_after_s" not in model.model_fields_set:
            continue
        section = sections.get(model.deployment_name, {})
        where = f"{path}args.models[{index}].deep_sleep_after_s"
        place = f"in the section of deployments named {model.deployment_name!r}"
        if scaling_of(section).get("min_replicas") != 0:
            yield (
                f"{where}: Serve keeps the process of {model.id!r}: set `autoscaling_config: "
                f"{{min_replicas: 0, ...}}` {place}, or leave it out"
            )
        elif not _has_load_policy(section):
            yield (
                f"{where}: the policy that scales {model.id!r} does not read it: set "
                f"`policy: {{policy_function: {LOAD_POLICY}}}` in the autoscaling_config {place}, "
                "or leave it out"
            )


def sections_of(application: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the sections of an application's `deployments:`, by their names."""
    return {str(each.get("name")): each for each in application.get("deployments") or ()}


def scaling_of(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `autoscaling_config` of a section; empty without one."""
    scaling: Mapping[str, Any] = section.get("autoscaling_config") or {}
    return scaling


def _has_load_policy(section: Mapping[str, Any]) -> bool:
    policy = scaling_of(section).get("policy") or {}
    return policy.get("policy_function") == LOAD_POLICY
