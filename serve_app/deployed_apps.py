"""What the deployed files say: of the application that is built, and of those beside it.

Serve passes a builder the `args:` of its application and nothing else, so the builder looks in the
files for the application that has them.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from ray.serve.schema import ServeApplicationSchema

from deployments.contract.model_spec import ModelSpec, number
from serve_app.backends.models.cluster_state import running_demands
from serve_app.backends.models.model_files import Nodes, RayNodes
from serve_app.commands.check.compose import BUILDER
from serve_app.commands.check.turns import light_groups_in
from serve_app.config import AppConfig
from serve_app.gpu_shares import known_shares
from serve_app.keys.api_keys import ApiKeysError, KeyRing, load_api_keys
from serve_app.placement import Demand, Node, choose_num_cpus, demands_of, stated_demands
from serve_app.shipped_files import SHIPPED


def resolve_num_cpus(
    args: AppConfig,
    specs: Mapping[str, ModelSpec],
    files: Iterable[ServeApplicationSchema],
    keys: KeyRing | None,
    nodes: Nodes | None = None,
) -> dict[str, float]:
    """Return the cores that Ray reserves for each replica, by the model's deployment.

    `auto` leaves room for the other applications of the files, and for those that run: they keep
    what they have. All builders of a file count the same, so it does not matter which is first.
    An application that no file names and that has the same models is the one that `serve.run`
    replaces. Actors and tasks besides Serve's are not known.

    Args:
        args: The `args:` of the application that is built.
        specs: Its models, by id.
        files: See `user_config_problems`.
        keys: The keys of the application.
        nodes: The nodes that the cluster has now; None asks Ray.
    """
    given = {model.deployment_name: number(model.num_cpus) for model in args.models}
    if None in given.values():
        files = list(files)
        file = next((each for each in files if has_args(each, args)), None)
        cluster = [
            Node(each.get("CPU", 0.0), int(each.get("GPU", 0.0)))
            for each in (nodes or RayNodes()).resources()
        ]
        most = max(1, int(sum(node.num_cpus for node in cluster)))
        demands = demands_of(
            args,
            () if file is None else _sections(file),
            {id_: spec.num_gpus for id_, spec in specs.items()},
            has_ledger=keys is not None and bool(keys.limited),
            most=most,
            light_groups=() if file is None else _light_groups(file).values(),
        )
        running = running_demands()
        own = _replaced(given, files, running) if file is None else file.name
        num_gpus = sum(node.num_gpus for node in cluster)
        beside = _demands_beside(own, files, running, num_gpus, most)
        kept = {each.name: each.num_cpus or 0.0 for each in running.get(own or "", ())}
        chosen = choose_num_cpus([*demands, *beside], cluster, kept)
        given |= {name: chosen[name] for name, cpus in given.items() if name in chosen}
    # A section's `ray_actor_options` stand in for the number of an entry that they name none for.
    return {name: 1.0 if cpus is None else cpus for name, cpus in given.items()}


def _replaced(
    deployments: Iterable[str],
    files: Iterable[ServeApplicationSchema],
    running: Mapping[str, Sequence[Demand]],
) -> str | None:
    """Return the application that `serve.run` replaces: the one with these models' deployments."""
    named = {file.name for file in files}
    ours = set(deployments)
    return next(
        (
            name
            for name, demands in running.items()
            if name not in named and ours <= {each.name for each in demands}
        ),
        None,
    )


def _demands_beside(
    own: str | None,
    files: Sequence[ServeApplicationSchema],
    running: Mapping[str, Sequence[Demand]],
    num_gpus: int,
    most: int,
) -> Iterator[Demand]:
    """Yield what applications beside one reserve, or will; no name is that of a deployment.

    Args:
        own: The application's name; None if it has none yet.
        files: The applications of the files.
        running: See `running_demands`.
        num_gpus: The GPUs of the cluster.
        most: See `demands_of`.
    """
    beside = {name: demands for name, demands in running.items() if demands}
    for file in files:
        running_cpus = {each.name: each.num_cpus for each in running.get(file.name, ())}
        if file.import_path == BUILDER:
            try:
                config = AppConfig.model_validate(file.args)
            except ValidationError:  # its own builder says so
                continue
            beside[file.name] = [
                replace(each, num_cpus=running_cpus.get(each.name, each.num_cpus))
                for each in demands_of(
                    config,
                    _sections(file),
                    known_shares(config.models, num_gpus),
                    has_ledger=_has_ledger(config),
                    most=most,
                    light_groups=_light_groups(file).values(),
                )
            ]
        elif not running_cpus:
            beside[file.name] = stated_demands(_sections(file), unstated_num_cpus=1.0)
    for name, demands in beside.items():
        if name != own:
            yield from (replace(each, name=f"{name}/{each.name}") for each in demands)


def _sections(file: ServeApplicationSchema) -> Sequence[Mapping[str, Any]]:
    """Return the `deployments:` of a file's application, each with the keys that it gives."""
    return file.model_dump(exclude_unset=True).get("deployments") or ()


def _light_groups(file: ServeApplicationSchema) -> Mapping[str, Sequence[str]]:
    """Return the groups of a file's application whose models sleep lightly between their turns."""
    return light_groups_in(file.model_dump(exclude_unset=True))


def _has_ledger(config: AppConfig) -> bool:
    try:
        keys = load_api_keys(config.auth, SHIPPED, os.environ)
    except ApiKeysError:  # its own builder says so
        return False
    return keys is not None and bool(keys.limited)


def turn_groups_of(args: AppConfig, files: Iterable[ServeApplicationSchema]) -> dict[str, str]:
    """Return the light groups of an application's models, by their ids.

    A builder is told its `args:` only, not the application's name. So of two applications with the
    same `args:` it can't tell which one is built, and both must have the same light groups. Each
    has turns of its own all the same.

    Args:
        args: The `args:` of the application that is built.
        files: The applications of the files.

    Raises:
        ValueError: Two have the same, and other light groups.
    """
    ours = [(file.name, _group_of_each(file)) for file in files if has_args(file, args)]
    for name, groups in ours[1:]:
        if groups != ours[0][1]:
            raise ValueError(
                f"the applications {ours[0][0]!r} and {name!r} have the same `args:`, but other "
                "`light` groups of turns: write the same in both, or change `args:` of one, such "
                "as a model's id"
            )
    return ours[0][1] if ours else {}


def _group_of_each(file: ServeApplicationSchema) -> dict[str, str]:
    return {id_: name for name, group in _light_groups(file).items() for id_ in group}


def has_args(file: ServeApplicationSchema, args: AppConfig) -> bool:
    """Return whether an application of a file has these `args:`: it is the one that is built."""
    try:
        return AppConfig.model_validate(file.args) == args
    except ValidationError:  # another kind of application
        return False
