"""What each model's replicas get: the settings of its entry, and its share of a GPU.

Nothing here imports torch or Ray: `raystream plan` needs both only where replicas run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deployments.contract.model_spec import ModelConfig, ModelSpec, number
from deployments.plan.model_shape import ModelShape
from deployments.plan.replica_plan import MIN_SHARE, shares_side_by_side, typical_bytes
from serve_app.shipped_files import SHIPPED

ReadShape = Callable[[ModelConfig], ModelShape]
"""Reads a model's sizes from its configuration, which may be downloaded for that."""


def resolve_models(
    models: Sequence[ModelConfig], num_cluster_gpus: float, read_shape: ReadShape
) -> dict[str, ModelSpec]:
    """Return what each model's replicas need to know, by the model's id.

    Args:
        models: The models' entries.
        num_cluster_gpus: GPUs that the cluster has now. If its GPU nodes are added only later,
            `num_gpus: auto` would wrongly mean 0; such a cluster needs a number.
        read_shape: Reads a model's sizes, if its share depends on what others need.
    """
    shares = share_gpus(models, num_cluster_gpus, read_shape)
    return {model.id: to_spec(model, shares.get(model.id, 0.0)) for model in models}


def share_gpus(
    models: Sequence[ModelConfig], num_cluster_gpus: float, read_shape: ReadShape
) -> Mapping[str, float]:
    """Return the share of a GPU of each model that gets one.

    Models whose share is chosen get a whole GPU each, if there are as many. Otherwise they stand
    side by side on what other models leave of one.

    Raises:
        ValueError: The shares that are given leave nothing.
    """
    shares = {model.id: _given_share(model, num_cluster_gpus) for model in models}
    chosen = [model for model in models if shares[model.id] is None]
    given = sorted((share for share in shares.values() if share), reverse=True)
    free = [1.0] * max(1, int(num_cluster_gpus))
    for share in given:
        for part in (1.0,) * int(share) if share > 1 else (share,):
            free[free.index(max(free))] -= part
    if not chosen:
        parts: Sequence[float] = []
    elif free.count(1.0) >= len(chosen):
        parts = [1.0] * len(chosen)
    else:
        needs = [_need(model, read_shape(model)) for model in chosen]
        parts = _place(needs, free)
    shares |= {model.id: part for model, part in zip(chosen, parts, strict=True)}
    return {id_: share for id_, share in shares.items() if share}


class _NeedsSizesError(Exception):
    """A share depends on what the models need."""


def known_shares(models: Sequence[ModelConfig], num_gpus: float) -> Mapping[str, float]:
    """Return the share of a GPU of each model, as far as it does not depend on models' sizes."""

    def refuse(model: ModelConfig) -> ModelShape:
        raise _NeedsSizesError(model.id)

    try:
        return share_gpus(models, num_gpus, refuse)
    except (ValueError, _NeedsSizesError):
        return {model.id: model.num_gpus for model in models if model.num_gpus != "auto"}


def _place(needs: Sequence[int], free: Sequence[float]) -> list[float]:
    """Return a share for each need, the largest first on the GPU that has most left for it.

    Raises:
        ValueError: A GPU's models would get less than they can start with.
    """
    members: list[list[int]] = [[] for _ in free]
    for i in sorted(range(len(needs)), key=lambda i: -needs[i]):
        loads = [sum(needs[j] for j in each) for each in members]
        usable = [
            left >= MIN_SHARE * (len(each) + 1) for left, each in zip(free, members, strict=True)
        ]
        if not any(usable):
            raise ValueError(
                "the GPUs are given away, and nothing is left for the models whose gpu_share is "
                "auto: lower the gpu_share or num_gpus of the others, or write `device: cpu`"
            )
        best = min(
            (gpu for gpu, is_usable in enumerate(usable) if is_usable),
            key=lambda gpu: (loads[gpu] + needs[i]) / free[gpu],
        )
        members[best].append(i)
    shares = [0.0] * len(needs)
    for left, each in zip(free, members, strict=True):
        if each:
            parts = shares_side_by_side([needs[i] for i in each], left)
            for i, part in zip(each, parts, strict=True):
                shares[i] = part
    return shares


def _given_share(model: ModelConfig, num_cluster_gpus: float) -> float | None:
    """Return the share that an entry names; 0 without a GPU, None if it is to be chosen."""
    if model.engine_urls:  # its servers have the GPUs
        return 0.0
    if model.num_gpus != "auto":
        return model.num_gpus
    if model.engine_args.uses_ray:  # its workers have GPUs, or wait for them
        return float(model.engine_args.num_workers)
    if not num_cluster_gpus or model.device == "cpu":
        return 0.0
    if model.engine == "vllm":  # it takes all that it gets
        num_workers = model.engine_args.num_workers
        return float(num_workers) if num_workers > 1 else number(model.gpu_share) or 1.0
    return number(model.gpu_share)


def _need(model: ModelConfig, shape: ModelShape) -> int:
    return typical_bytes(to_spec(model, 1.0), shape, is_pooler=model.task != "generate")


def with_turns(
    specs: Mapping[str, ModelSpec], name: str, group: Sequence[str]
) -> dict[str, ModelSpec]:
    """Return the specs of the models of a light group, which know it.

    Args:
        specs: The models of an application, by their ids.
        name: The group.
        group: The ids of its models.

    Raises:
        ValueError: They run on a GPU, and don't say how much of it they share.
    """
    members = [specs[id_] for id_ in group if id_ in specs]  # others are refused elsewhere
    shares = {spec.num_gpus for spec in members}
    is_chosen = any(spec.entry.num_gpus == "auto" for spec in members)
    if shares != {0.0} and (is_chosen or len(shares) > 1):
        raise ValueError(share_advice(name))
    return {spec.id: replace(spec, turn_group=name, num_turns=len(members)) for spec in members}


def share_advice(group: str) -> str:
    """Return what to write in the entries of a light group whose models run on a GPU."""
    return (
        f"the models of the light group {group!r} use the same part of one GPU, one at a time: "
        "write the same number in each entry, such as `num_gpus: 1`"
    )


def to_spec(model: ModelConfig, num_gpus: float) -> ModelSpec:
    """Return what a model's replicas are created with.

    Args:
        model: The model's entry.
        num_gpus: The share of a GPU that each replica gets.
    """
    adapters = tuple(
        each.model_copy(update={"source": _resolve_source(each.source)}) for each in model.adapters
    )
    entry = model.model_copy(update={"adapters": adapters}) if adapters else model
    return ModelSpec(entry, _resolve_source(model.source), num_gpus)


def _resolve_source(source: str) -> str:
    """Return a folder's absolute path; a hub id unchanged.

    A relative folder is one here, or one of those shipped. What can only be a path is one, whether
    or not there is such a folder.
    """
    try:
        here = Path(source).expanduser()
    except RuntimeError:  # an unknown user's home: loading says that there is no such folder
        return source
    if here.is_dir() or here.is_absolute() or source.startswith(("./", "../")):
        return str(here.resolve())
    shipped = SHIPPED / source
    return str(shipped.resolve()) if (shipped / "config.json").is_file() else source
