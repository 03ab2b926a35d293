"""What a file says of models that take turns on a device: the mistakes in it, and the groups.

The groups stand in the arguments of the application's scaling policy (`deployments.turns`). Ray
passes them on unread, and raises what is wrong with them in its controller, where nobody sees it.
So the check and the builder read them first.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, ValidationError

from deployments.contract.model_spec import NO_POOLER_TURNS_ON_GPU, ModelConfig
from deployments.contract.strict_model import StrictModel
from deployments.turns import MAX_START_S, fit_together
from serve_app.commands.check.sleep_check import scaling_of, sections_of
from serve_app.config import AppConfig
from serve_app.gpu_shares import share_advice

TURN_POLICY: Final = "deployments.turns:TurnPolicy"
"""The `policy_function` by which models take turns."""


def _with_parts(group: Any) -> Any:
    """Return a group as the part of the device that each model takes: a list gives it all of it.

    Raises:
        ValueError: It is neither, or has a model twice.
    """
    if isinstance(group, Mapping):
        return group
    is_list = isinstance(group, list | tuple) and all(isinstance(each, str) for each in group)
    if not is_list:
        raise ValueError("write a list of ids, or the part of each: {small: 0.3, large: 0.9}")
    twice = next((each for each in group if group.count(each) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is twice in it; a model takes turns in one group, once")
    return dict.fromkeys(group, 1.0)


Part = Annotated[float, Field(gt=0, le=1)]

Group = Annotated[dict[str, Part], BeforeValidator(_with_parts), Field(min_length=2)]
"""The part of the device that each model of a group takes, by its id; at the start the first goes
first.
"""


class TurnPolicyConfig(StrictModel):
    """The `policy_kwargs` of `TurnPolicy`."""

    groups: dict[str, Group] = Field(min_length=1)
    """By a name of your choice, such as the device's, the models that take turns. A list of ids:
    one of them has replicas at a time, unless the group is `light`. Ids with the part of the device
    that each takes with all its replicas, such as `{small: 0.4, other: 0.5, large: 0.9}`: those
    have turns at the same time whose parts sum up to at most 1. At the start the first goes first.
    """
    min_turn_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The least length of a turn while another model waits and the one that runs has work. More
    spends less of the time on swaps, and lets the others wait longer. null is three times what a
    swap takes, as measured while the server runs: at least 10, at most 120, and 30 at the start.
    """
    max_start_s: float = Field(default=MAX_START_S, gt=0, allow_inf_nan=False)
    """The most seconds that a model which doesn't start keeps its turn while another waits. More
    than the slowest start, or its model never runs.
    """
    light: tuple[str, ...] = ()
    """Names of groups whose models keep their processes and sleep lightly while another one has the
    turn, so that a swap takes no start. Each member needs `max_replicas: 1` and no surge, no
    `light_sleep_after_s: null`, and all of them room beside each other for some 400 MB.
    """

    @property
    def light_groups(self) -> dict[str, Group]:
        """The groups of `light`, by their names."""
        return {name: group for name, group in self.groups.items() if name in self.light}

    @property
    def together(self) -> dict[str, list[tuple[str, ...]]]:
        """By group, the largest sets of models that have turns at the same time.

        A model that fits beside no other one is a set of its own.
        """
        return {name: _largest_sets(parts) for name, parts in self.groups.items()}


def _largest_sets(parts: Mapping[str, float]) -> list[tuple[str, ...]]:
    def do_fit(ids: Iterable[str]) -> bool:
        return fit_together(parts[each] for each in ids)

    sets: list[tuple[str, ...]] = [()]
    for id_ in parts:
        sets += [(*each, id_) for each in sets if do_fit((*each, id_))]
    return [
        each
        for each in sets
        if not any(do_fit((*each, other)) for other in parts if other not in each)
    ]


def turns_in(application: Mapping[str, Any]) -> TurnPolicyConfig | None:
    """Return what an application of a file says of turns; None if its models take none.

    Raises:
        pydantic.ValidationError: It is wrong.
    """
    policy = application.get("autoscaling_policy") or {}
    if policy.get("policy_function") != TURN_POLICY:
        return None
    return TurnPolicyConfig.model_validate(policy.get("policy_kwargs") or {})


def light_groups_in(application: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the ids of models that sleep lightly between their turns, by their groups.

    There are none in an application of which `turn_problems` finds that it is wrong.
    """
    try:
        found = turns_in(application)
    except ValidationError:
        return {}
    light = {} if found is None else found.light_groups
    return {name: tuple(group) for name, group in light.items()}


def told_together(sets: Iterable[Sequence[str]]) -> str:
    """Return in words which models of a group have turns at the same time."""
    return ", or ".join(" with ".join(each) for each in sets)


def turn_notes(application: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield which models have turns at the same time, if some do; each line begins with its path.

    Args:
        application: The application, as in the file.
        path: Where it is in the file, with a dot at its end.
    """
    try:
        found = turns_in(application)
    except ValidationError:  # `turn_problems` says so
        return
    for name, sets in {} if found is None else found.together.items():
        if any(len(each) > 1 for each in sets):
            where = f"{path}autoscaling_policy.policy_kwargs.groups.{name}"
            yield f"{where}: models that have turns at the same time: {told_together(sets)}"


def turn_problems(
    application: Mapping[str, Any], config: AppConfig, path: str = ""
) -> Iterator[str]:
    """Yield what is wrong with an application's turns; each line begins with its path.

    Args:
        application: The application, as in the file.
        config: Its `args:`.
        path: Where it is in the file, with a dot at its end; empty if it is told alone.
    """
    where = f"{path}autoscaling_policy.policy_kwargs"
    try:
        found = turns_in(application)
    except ValidationError as error:
        for each in error.errors():
            place = ".".join(map(str, (where, *each["loc"])))
            yield f"{place}: {each['msg'].removeprefix('Value error, ')}"
        return
    if found is None:
        return
    ids = {model.id: model.deployment_name for model in config.models}
    yield from _group_problems(found.groups, list(ids), f"{where}.groups")
    sections = sections_of(application)
    members = dict.fromkeys(id_ for group in found.groups.values() for id_ in group if id_ in ids)
    for id_ in members:
        if scaling_of(sections.get(ids[id_], {})).get("min_replicas") != 0:
            yield (
                f"{where}.groups: {id_!r} takes turns, so Serve must be able to stop it: set "
                f"`autoscaling_config: {{min_replicas: 0, ...}}` in the section of deployments "
                f"named {ids[id_]!r}"
            )
    yield from _light_problems(found, config, sections, f"{where}.light")


def _light_problems(
    found: TurnPolicyConfig,
    config: AppConfig,
    sections: Mapping[str, Mapping[str, Any]],
    path: str,
) -> Iterator[str]:
    for name in found.light:
        if name not in found.groups:
            near = get_close_matches(name, found.groups, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(found.groups)}"
            yield f"{path}: no group is called {name!r}: {hint}"
    models = {model.id: model for model in config.models}
    for name, group in found.light_groups.items():
        if any(part < 1 for part in group.values()):
            yield (
                f"{path}: of the light group {name!r} one model at a time holds memory, so its "
                "members have no parts: write a list of their ids, or take it out of `light`"
            )
        members = [models[id_] for id_ in group if id_ in models]
        shares = {model.num_gpus for model in members}
        if len(shares) > 1 and shares != {"auto", 0}:
            yield f"{path}: {share_advice(name)}"
        for model in members:
            section = sections.get(model.deployment_name, {})
            for advice in _light_advice(model, section):
                yield f"{path}: {model.id!r}, of the group {name!r}, {advice}"


def _light_advice(model: ModelConfig, section: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a model can't sleep lightly between its turns, and what to write.

    Args:
        model: Its entry.
        section: Its section of `deployments:`.
    """
    if model.engine != "raystream":
        yield (
            "is vLLM's, which takes no light turns: take it out of the group, or the group out of "
            "`light`, so that swaps end and start processes"
        )
    elif not model.can_take_light_turns:
        yield NO_POOLER_TURNS_ON_GPU
    elif model.light_sleep_after_s is None:
        yield (
            "sleeps lightly while another model has the turn, and can't or may not: take "
            "`light_sleep_after_s: null` out of its entry, or the group out of `light`"
        )
    elif not model.may_sleep_lightly:
        yield (
            "sleeps lightly on a GPU only if its entry says so: write `light_sleep_after_s: 60` "
            "there, or take the group out of `light`"
        )
    where = f"in the section of deployments named {model.deployment_name!r}"
    default = 100 if section.get("num_replicas") == "auto" else 1  # Ray's own
    most = scaling_of(section).get("max_replicas", default)
    if most != 1:
        yield f"keeps one replica, and may have {most}: write `max_replicas: 1` {where}"
    if section.get("max_surge_percent"):
        yield (
            "would start a new replica before the old one gives its memory back, which never "
            f"ends: take `max_surge_percent` out {where}"
        )


def _group_problems(groups: Mapping[str, Group], ids: Sequence[str], path: str) -> Iterator[str]:
    home: dict[str, str] = {}
    for name, group in groups.items():
        for id_ in group:
            if id_ not in ids:
                near = get_close_matches(id_, ids, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(ids)}"
                yield f"{path}.{name}: no model has the id {id_!r}: {hint}"
            elif id_ in home:
                both = f"in {home[id_]} and in {name}"
                yield f"{path}.{name}: {id_!r} is {both}; a model takes turns in one group, once"
            home.setdefault(id_, name)
