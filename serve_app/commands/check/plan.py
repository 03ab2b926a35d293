"""`raystream plan`: how a model's memory would be divided, before anything is bought or started.

Reads configurations only: no weights, no GPU. torch is not imported, so a laptop can plan a
server's card.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pynvml
import yaml
from pydantic import ValidationError

from deployments.contract.descriptions import Task
from deployments.contract.model_spec import ModelConfig, ModelSpec
from deployments.contract.unsupported_model import (
    UnsupportedModelError,
    pointer_advice,
    pointers_in,
    reason_of,
)
from deployments.plan import cgroup
from deployments.plan.checkpoint import CONFIG_FILE, check_checkpoint, find_file, weights_of
from deployments.plan.memory_budget import GIB, HEADROOM, DeviceMemoryError
from deployments.plan.model_shape import ITEM_BYTES, ModelShape
from deployments.plan.processor import has_bfloat16
from deployments.plan.replica_plan import ReplicaPlan, SequenceLengthError, plan_replica
from deployments.plan.sizes import DeviceMemory
from deployments.plan.sleep_memory import pinned_bytes
from deployments.plan.weight_count import counted_shape
from serve_app.commands.check.model_source import read_files
from serve_app.commands.check.sleep_check import Sleep, sleep_of
from serve_app.commands.check.source_files import ModelFiles, SourceError
from serve_app.commands.check.turns import TurnPolicyConfig, turns_in
from serve_app.config import AppConfig
from serve_app.gpu_shares import resolve_models, to_spec, with_turns
from serve_app.strict_yaml import UniqueKeyLoader, line_of, why_unreadable

SLEEPER_BYTES: Final = 400 * 10**6
"""What a model that sleeps lightly keeps, most of it imports: 390 and 412 MiB of two models."""

UNITS: Final = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)")


class PlanError(ValueError):
    """Nothing can be planned; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A model that does not fit.

    Attributes:
        spec: Its entry.
        message: Why, and the numbers that would do.
        least_bytes: The smallest share that would hold it; None if that is not known.
    """

    spec: ModelSpec
    message: str
    least_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MeasuredByVllm:
    """A model that vLLM runs, which divides memory itself once the weights are loaded.

    Attributes:
        spec: Its entry.
        weight_bytes: Its weights, by their files or by the configuration; None if neither says.
        bytes_of_each: What vLLM takes of each device.
    """

    spec: ModelSpec
    weight_bytes: int | None
    bytes_of_each: int

    @property
    def fits(self) -> bool:
        """Whether the weights leave anything."""
        return (self.weight_bytes or 0) < self.bytes_of_each * self.num_devices

    @property
    def num_devices(self) -> int:
        """How many devices the weights are divided among."""
        return self.spec.entry.engine_args.num_workers


Planned = ReplicaPlan | Refusal | MeasuredByVllm


@dataclass(frozen=True, slots=True)
class Card:
    """What models are planned for.

    Attributes:
        memory: Its memory.
        num: How many there are; 0 for the machine's own memory.
    """

    memory: DeviceMemory
    num: int

    @property
    def name(self) -> str:
        """Its description in a table."""
        size = f"{self.memory.total_bytes / GIB:.1f} GiB"
        return f"a GPU with {size}" if self.num else f"this machine's CPU, {size} free"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `48GiB` or `24 GB`.

    Raises:
        PlanError: It is not such a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise PlanError(f"{text!r} is no size: write a number and a unit, such as 48GiB or 24GB")
    size = int(float(match[1]) * UNITS[match[2]])
    if size == 0:
        raise PlanError(f"{text!r} holds nothing: give the memory of a card, such as 48GiB")
    return size


def card_of(gpu_memory: str | None, num_gpus: int = 1) -> Card:
    """Return the card to plan for.

    Args:
        gpu_memory: The memory of a GPU; None takes this machine's GPUs, or else its own memory.
        num_gpus: How many GPUs with so much memory there are.

    Raises:
        PlanError: The memory is not a size.
    """
    if gpu_memory is not None:
        return Card(DeviceMemory(parse_size(gpu_memory)), num_gpus)
    return _own_gpus() or _own_cpu()


def _own_gpus() -> Card | None:
    """Return this machine's GPUs, the smallest of which counts; None if it has none."""
    try:
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        sizes = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
    except pynvml.NVMLError:
        return None
    return Card(DeviceMemory(min(sizes)), len(sizes)) if sizes else None


def _own_cpu() -> Card:
    memory = DeviceMemory(
        cgroup.available_bytes(),
        on_cpu=True,
        has_bf16=has_bfloat16(),
        whole_bytes=cgroup.total_bytes(),
    )
    return Card(memory, 0)


def models_of(file: Path) -> tuple[ModelConfig, ...]:
    """Return the models of a Serve configuration.

    Raises:
        PlanError: The file can't be read, or is wrong; `raystream check` says more.
    """
    return models_and_turns_of(file)[0]


def models_and_turns_of(file: Path) -> tuple[tuple[ModelConfig, ...], TurnPolicyConfig | None]:
    """Return the models of a Serve configuration, and which take turns; None if none do.

    Raises:
        PlanError: The file can't be read, or is wrong; `raystream check` says more.
    """
    try:
        application = _application_in(file)
        models = AppConfig.model_validate(application["args"]).models
        return tuple(_beside(model, file.parent) for model in models), turns_in(application)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{file}: {why_unreadable(error)}") from error
    except (yaml.YAMLError, TypeError, KeyError, AttributeError, ValidationError) as error:
        raise PlanError(f"{file} is not right; `raystream check {file}` says where") from error


def _application_in(file: Path) -> Mapping[str, Any]:
    document = yaml.load(file.read_text(encoding="utf-8"), Loader=UniqueKeyLoader)
    found = [app for app in document["applications"] if "models" in (app.get("args") or {})]
    if len(found) != 1:
        raise PlanError(
            f"{file} has {len(found)} applications with models; a plan takes a file with one"
        )
    application: Mapping[str, Any] = found[0]
    return application


def sleeps_of(file: Path, found: Sequence[Planned]) -> Mapping[str, Sleep]:
    """Return when the models of a Serve configuration sleep, by their ids.

    Args:
        file: A file of which `models_and_turns_of` has returned the models.
        found: Their plans.
    """
    deployments = _application_in(file).get("deployments") or ()
    sections = {str(section.get("name")): section for section in deployments}
    specs = [each.spec for each in found]
    return {spec.id: sleep_of(spec, sections.get(spec.entry.deployment_name, {})) for spec in specs}


def pinned_of(found: Sequence[Planned], sleeps: Mapping[str, Sleep]) -> Mapping[str, int]:
    """Return the host memory that models keep pinned once they have slept on a GPU, by their ids.

    It is that of one replica each. Models that never sleep lightly, or on a CPU, are left out.

    Args:
        found: Their plans.
        sleeps: When they sleep.
    """
    pinned = {}
    for each in found:
        sleep = sleeps.get(each.spec.id)
        if sleep is None or sleep.light_after_s is None:
            continue
        if isinstance(each, MeasuredByVllm):
            if each.spec.num_gpus:
                pinned[each.spec.id] = pinned_bytes(each.weight_bytes or 0, by_vllm=True)
        elif isinstance(each, ReplicaPlan) and not each.device.on_cpu:
            pinned[each.spec.id] = pinned_bytes(each.demand.weight_bytes, by_vllm=False)
    return pinned


def places_of(file: Path) -> list[str]:
    """Return the file's name and the line of each model that `models_of` returns."""
    text = file.read_text(encoding="utf-8")
    applications = yaml.load(text, Loader=UniqueKeyLoader)["applications"]
    return [
        f"{file}:{line_of(text, f'applications[{index}].args.models[{number}]')}"
        for index, application in enumerate(applications)
        for number, _ in enumerate((application.get("args") or {}).get("models", ()))
    ]


def _beside(model: ModelConfig, folder: Path) -> ModelConfig:
    """Return a model's entry with the absolute paths of folders that lie beside the file."""
    source = folder / model.source
    own = {"source": str(source.resolve())} if source.is_dir() else {}
    if model.engine_python is not None:
        own["engine_python"] = str(folder / Path(model.engine_python).expanduser())
    return model.model_copy(update=own)


def read_shape(source: str, revision: str | None, *, is_pooler: bool) -> ModelShape:
    """Read a model's sizes from its configuration, and from its files' headers if there are any.

    Args:
        source: A folder, a `config.json`, or the id of a hub repository.
        revision: A commit of the hub repository.
        is_pooler: Whether the model classifies or embeds.

    Raises:
        PlanError: There is no such configuration, it lacks a size, or no replica would load it.
    """
    config = _load_config(source, revision)
    try:
        return counted_shape(config, source, revision, is_pooler=is_pooler)
    except ValueError as error:
        raise PlanError(f"{source!r} can't be planned: {error}") from error


def entry_of(source: str, dtype: str, sizes: Mapping[str, int]) -> ModelConfig:
    """Return an entry for a model by itself.

    Args:
        source: A folder, a `config.json`, or the id of a hub repository.
        dtype: See `ModelConfig`.
        sizes: The sizes that are given, by their names in `ModelConfig`; others are auto.

    Raises:
        PlanError: There is no such configuration, or an option is wrong.
    """
    task = _task_of(source, _load_config(source, None))
    path = Path(source)
    name = path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")
    entry = {
        "id": re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("-._") or "model",
        "source": source,
        "task": task,
        "dtype": dtype,
        **sizes,
    }
    if task != "generate":
        for name in ("max_num_seqs", "kv_cache_memory_bytes"):
            entry.pop(name, None)
    try:
        return ModelConfig.model_validate(entry)
    except ValidationError as error:
        messages = (item["msg"].removeprefix("Value error, ") for item in error.errors())
        raise PlanError("; ".join(messages)) from error


def _task_of(source: str, config: Any) -> Task:
    """Return what a model is made for, as `raystream serve` finds it."""
    names = {file.name for file in Path(source).glob("*")}
    return ModelFiles(source, frozenset(names), None, None, config.to_dict()).task


def _load_config(source: str, revision: str | None) -> Any:
    if "torch" not in sys.modules:
        # transformers would import torch, which takes a second and is not needed for this.
        sys.modules["torch"] = None  # type: ignore[assignment] # so that importing it fails
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoConfig

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    try:
        if not Path(source).exists() and not find_file(
            source, revision, CONFIG_FILE, local_only=True
        ):
            read_files(source, revision)  # tells in seconds that there is no such repository
        check_checkpoint(source, revision)
        return AutoConfig.from_pretrained(source, **options)
    except (UnsupportedModelError, SourceError) as error:
        raise PlanError(str(error)) from error
    except Exception as error:  # of any class, as transformers checks little
        if pointers := pointers_in([Path(source), Path(source, "config.json")]):
            raise PlanError(f"{source!r} can't be planned: {pointer_advice(pointers)}") from error
        raise PlanError(
            f"{source!r} has no configuration that can be read: {reason_of(error)} Give a folder, "
            "a config.json, or the id of a hub repository"
        ) from error


def plan_models(
    models: Sequence[ModelConfig],
    card: Card,
    share: float | None = None,
    turns: TurnPolicyConfig | None = None,
) -> list[Planned]:
    """Plan a replica of each model, on one card or side by side.

    Args:
        models: The models' entries.
        card: What they run on.
        share: The share of each; None takes that of the entries.
        turns: Which of them take turns.

    Raises:
        PlanError: A configuration can't be read, or the shares leave nothing.
    """

    def shape_of(model: ModelConfig) -> ModelShape:
        source = to_spec(model, 0).source
        return read_shape(source, model.revision, is_pooler=model.task != "generate")

    models = [model for model in models if not model.engine_urls]  # others have their memory
    shapes = {model.id: shape_of(model) for model in models if model.engine == "raystream"}
    try:
        specs = resolve_models(models, card.num, lambda model: shapes[model.id])
        for name, group in ({} if turns is None else turns.light_groups).items():
            specs |= with_turns(specs, name, [*group])
    except ValueError as error:
        raise PlanError(str(error)) from error
    if share is not None:
        specs = {id_: replace(spec, num_gpus=share) for id_, spec in specs.items()}
    cpu = card.memory if card.num == 0 else _own_cpu().memory

    def plan(model: ModelConfig, held_bytes: int = 0) -> Planned:
        spec = specs[model.id]
        is_on_cpu = card.num == 0 or spec.num_gpus == 0
        if model.engine == "vllm":
            return _plan_of_vllm(spec, cpu if is_on_cpu else card.memory, is_on_cpu=is_on_cpu)
        memory = replace(cpu, foreign_bytes=held_bytes) if is_on_cpu else card.memory
        return _plan(spec, shapes[model.id], memory, is_pooler=model.task != "generate")

    found = [plan(model) for model in models]
    held = _held_by_others(found, cpu, turns)
    return [
        plan(model, held[model.id]) if held.get(model.id) else each
        for model, each in zip(models, found, strict=True)
    ]


def _plan_of_vllm(spec: ModelSpec, memory: DeviceMemory, *, is_on_cpu: bool) -> MeasuredByVllm:
    """Return what is known of a model that vLLM runs: its weights, and what it gets.

    Raises:
        PlanError: There is no such model.
    """
    source, revision = spec.source, spec.entry.revision
    try:
        read_files(source, revision)
    except SourceError as error:
        raise PlanError(str(error)) from error
    _, found_bytes = weights_of(source, revision)
    weight_bytes = found_bytes or _counted_bytes(spec)
    part = 1.0 if is_on_cpu else spec.entry.engine_args.utilization(spec.device_share)
    return MeasuredByVllm(spec, weight_bytes, int(memory.total_bytes * part))


def _counted_bytes(spec: ModelSpec) -> int | None:
    """Return the bytes of weights whose files are not here; None for a model unknown here."""
    try:
        shape = read_shape(spec.source, spec.entry.revision, is_pooler=False)
    except PlanError:
        return None
    return shape.weights.total * ITEM_BYTES[shape.dtype]


def _held_by_others(
    found: Sequence[Planned], cpu: DeviceMemory, turns: TurnPolicyConfig | None
) -> Mapping[str, int]:
    """Return what the others hold of a CPU's memory, by the id of each model that runs on it.

    Replicas on a CPU have no shares: each takes what it needs of what is free. Others hold all that
    they may take, or what they start with if the memory can't hold all of that.

    Args:
        found: The plan of each model by itself.
        cpu: The machine's memory.
        turns: Which of them take turns: of a group only those hold memory that have turns at the
            same time, beside what those that sleep lightly keep.
    """
    plans = [each for each in found if isinstance(each, ReplicaPlan) and each.device.on_cpu]
    most = {plan.spec.id: plan.most_bytes for plan in plans}
    if sum_at_once(most, turns) > cpu.total_bytes * (1 - HEADROOM):
        most = {plan.spec.id: plan.start_bytes for plan in plans}
    return {
        id_: sum_at_once(
            {other: size for other, size in most.items() if other != id_}, turns, beside=id_
        )
        for id_ in most
    }


def _plan(
    spec: ModelSpec, shape: ModelShape, memory: DeviceMemory, *, is_pooler: bool
) -> ReplicaPlan | Refusal:
    try:
        return plan_replica(spec, shape, memory, is_pooler=is_pooler)
    except DeviceMemoryError as error:
        return Refusal(spec, str(error), error.least_bytes)
    except SequenceLengthError as error:
        return Refusal(spec, str(error))


def all_fit(found: Sequence[Planned]) -> bool:
    """Return whether no model is known to be too large."""
    return all(
        each.fits if isinstance(each, MeasuredByVllm) else isinstance(each, ReplicaPlan)
        for each in found
    )


def sum_at_once(
    sizes: Mapping[str, int], turns: TurnPolicyConfig | None, beside: str | None = None
) -> int:
    """Return the most that models hold at once.

    Of those that take turns it is the largest set that has turns at the same time, and
    `SLEEPER_BYTES` of each other one that sleeps lightly meanwhile.

    Args:
        sizes: The bytes of each model.
        turns: Which take turns.
        beside: A model that has its turn, and is not counted itself; what its group holds beside it
            is.
    """
    if turns is None:
        return sum(sizes.values())
    members = {id_ for group in turns.groups.values() for id_ in group}
    held = sum(size for id_, size in sizes.items() if id_ not in members)
    for name, sets in turns.together.items():
        group = turns.groups[name]
        possible = [each for each in sets if beside in each] if beside in group else sets
        held += max(sum(sizes.get(id_, 0) for id_ in each) for each in possible)
        if name in turns.light and (beside in group or not sizes.keys().isdisjoint(group)):
            held += (len(group) - 1) * SLEEPER_BYTES
    return held
