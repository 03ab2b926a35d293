"""The device that Ray has assigned to this replica."""

import ray
from ray.runtime_context import get_runtime_context

from deployments.contract.model_spec import ModelSpec
from deployments.device.device import CpuDevice, MemoryDevice, open_device
from deployments.device.process_tree import RankGpus, WatchedGpus
from deployments.replica.own_card import require_own_card


def open_assigned_device(spec: ModelSpec) -> MemoryDevice:
    """Return the device that Ray has assigned to this process; without Ray, the spec's device.

    Raises:
        ValueError: Ray has reserved a different share than the model's entry asks for, or there is
            no usable GPU.
        OtherCardError: Other models of its light group are on another GPU.
    """
    assigned = _require_assigned(spec)
    require_own_card(spec)
    return open_device(spec.entry.device, has_gpu=assigned > 0)


def open_watched_device(spec: ModelSpec) -> MemoryDevice:
    """Return the device that Ray has assigned for processes below this one to compute on.

    Where Ray starts the workers of a divided model, that is the GPUs of these.

    Raises:
        ValueError: See `open_assigned_device`.
    """
    assigned, kind = _require_assigned(spec), spec.entry.device
    if spec.entry.engine_args.uses_ray:
        return RankGpus(spec.entry.engine_args.num_workers)
    has_gpu = kind == "cuda" or (kind == "auto" and assigned > 0)
    return WatchedGpus.assigned() if has_gpu else CpuDevice()


def _require_assigned(spec: ModelSpec) -> float:
    """Return the GPUs that Ray has assigned to this process.

    Raises:
        ValueError: They are not what the model's entry asks for.
    """
    expected = spec.num_own_gpus
    assigned = _assigned_gpus() if ray.is_initialized() else expected
    if abs(assigned - expected) > 1e-4:
        part = "" if spec.num_turns == 1 else f", a part for each of {spec.num_turns} light turns"
        raise ValueError(
            f"{spec.id}: the model's entry asks for num_gpus {expected:g}{part}, but Ray has "
            f"reserved {assigned:g}: `ray_actor_options` under `deployments:` replaces the entry's "
            "num_cpus and num_gpus; name both there, or remove it"
        )
    return assigned


def _assigned_gpus() -> float:
    resources: dict[str, float] = get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call] # Ray leaves it untyped
    return resources.get("GPU", 0.0)
