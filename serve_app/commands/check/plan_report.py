"""How `raystream plan` tells its plans: a table and lines for people, JSON for programs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from deployments.plan.memory_budget import GIB, HEADROOM, OUTSIDE_BYTES
from deployments.plan.replica_plan import ReplicaPlan
from deployments.plan.start_times import last_start_s, last_wake_s
from serve_app.commands.check.plan import (
    SLEEPER_BYTES,
    Card,
    MeasuredByVllm,
    Planned,
    Refusal,
    pinned_of,
    sum_at_once,
)
from serve_app.commands.check.sleep_check import Sleep
from serve_app.commands.check.turns import TurnPolicyConfig, told_together

LENGTHS: Final = (1024, 4096, 16_384)
"""Lengths of sequences for which a plan says how many run at once, in tokens."""

MEASURED_WHERE: Final = (
    "Captured steps are planned with what they took on an H100. A replica measures its memory when "
    "it starts; its log and GET /v1/devices show planned and measured memory side by side."
)


LIGHT_SWAP: Final = (
    "The others sleep lightly meanwhile: a swap reads the weights of the next one from the cache "
    f"folder, and each sleeper keeps about {SLEEPER_BYTES / 10**6:.0f} MB"
)


def tell(
    found: Sequence[Planned],
    card: Card,
    turns: TurnPolicyConfig | None = None,
    sleeps: Mapping[str, Sleep] = MappingProxyType({}),
) -> None:
    """Print a table of the plans, and a line for each model that sleeps, takes turns or is too big.

    Args:
        found: The plans.
        card: What they are for.
        turns: Which models take turns.
        sleeps: When models sleep, by their ids.
    """
    console = Console()
    if plans := [each for each in found if isinstance(each, ReplicaPlan)]:
        _tell_plans(plans, card, console, turns)
    for each in found:
        if isinstance(each, MeasuredByVllm):
            console.print(_told(each), soft_wrap=True)
    for id_, sleep in sleeps.items():
        if str(sleep):
            console.print(f"{id_} {sleep}", soft_wrap=True, markup=False)
    if pinned := pinned_of(found, sleeps):
        of_each = ", ".join(f"{id_} {_gib(size)}" for id_, size in pinned.items())
        console.print(
            f"Once they have slept, replicas keep up to {_gib(sum(pinned.values()))} of the "
            f"machine's memory pinned, one of each model: {of_each}",
            soft_wrap=True,
            markup=False,
        )
    for line in () if turns is None else _turns(found, card, turns):
        console.print(line, soft_wrap=True, markup=False)
    refused = [each for each in found if isinstance(each, Refusal)]
    for each in refused:
        console.print(f"{each.spec.id} does not fit: {each.message}", soft_wrap=True)
    if refused and len(found) > 1:
        own = [each for each in found if not isinstance(each, MeasuredByVllm)]
        least = sum(_least_bytes(each) for each in own)
        console.print(f"Side by side they need {least / GIB:.1f} GiB at least.", soft_wrap=True)


def _turns(found: Sequence[Planned], card: Card, turns: TurnPolicyConfig) -> Iterator[str]:
    """Yield which models take turns and for how long, and which don't fit as the file says."""
    least = "three times a swap" if turns.min_turn_s is None else f"{turns.min_turn_s:g} s"
    for name, sets in turns.together.items():
        group = turns.groups[name]
        swaps = _swaps(found, [*group], is_light=name in turns.light_groups)
        at_once = told_together(sets) if max(map(len, sets)) > 1 else "one of them"
        yield (
            f"{', '.join(group)} take turns ({name}): {at_once} runs at a time, for at least "
            f"{least} while another is asked for. {swaps}"
        )
        shares = {each.spec.id: each.spec.num_gpus for each in found}
        for ids in sets if card.num else ():
            num_gpus = round(sum(shares.get(id_, 0.0) for id_ in ids), 6)
            if len(ids) > 1 and num_gpus > card.num:
                yield (
                    f"{' and '.join(ids)} have turns at the same time, but reserve "
                    f"{num_gpus:g} of {card.num} GPUs: raise their parts in the group "
                    f"{name}, or lower their shares"
                )


def _swaps(found: Sequence[Planned], group: Sequence[str], *, is_light: bool) -> str:
    """Return what the swaps of a group take, by the last starts or wakes of its models."""
    last_s = last_wake_s if is_light else last_start_s
    specs = {each.spec.id: each.spec for each in found}
    seconds = {id_: last_s(specs[id_]) if id_ in specs else None for id_ in group}
    told = ", ".join(f"{id_} {_seconds(last)}" for id_, last in seconds.items())
    if is_light:
        light_swap = _light_swap([each for each in found if each.spec.id in group])
        return f"{light_swap}; the last wakes on this machine: {told}"
    if not any(seconds.values()):
        return "A swap starts the next one, which was not measured on this machine yet"
    return f"A swap starts the next one; the last starts on this machine: {told}"


def _light_swap(found: Sequence[Planned]) -> str:
    """Return what a swap of a light group is, and what its models keep while they sleep."""
    plans = [each for each in found if isinstance(each, ReplicaPlan)]
    if not plans or any(plan.device.on_cpu for plan in plans):
        return LIGHT_SWAP
    weight_bytes = sum(plan.demand.weight_bytes for plan in plans)
    return (
        "The others sleep lightly meanwhile, in processes on the same card: a swap copies the "
        f"weights of the next one from the machine's memory, which keeps {weight_bytes / GIB:.1f} "
        "GiB of weights for all of them, or a file where it has no room; each sleeper keeps about "
        f"{OUTSIDE_BYTES / 10**6:.0f} MB of the card, which the others don't plan with"
    )


def _seconds(start_s: float | None) -> str:
    return "not measured yet" if start_s is None else f"{start_s:.1f} s"


def _tell_plans(
    plans: Sequence[ReplicaPlan], card: Card, console: Console, turns: TurnPolicyConfig | None
) -> None:
    table = Table(title=f"One replica on {card.name}, planned")
    for column in ("", *(plan.spec.id for plan in plans)):
        table.add_column(column, justify="right" if column else "left")
    rows = [_rows(plan) for plan in plans]
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    console.print(table)
    for plan in plans:
        for line in plan.explanations:
            console.print(line, soft_wrap=True)
    if any(not plan.device.on_cpu for plan in plans):
        console.print(MEASURED_WHERE, soft_wrap=True)
    for line in _together([plan for plan in plans if plan.device.on_cpu], turns):
        console.print(line, soft_wrap=True)


def _told(each: MeasuredByVllm) -> str:
    """Return in words what is known of a model that vLLM runs."""
    where = f"{each.num_devices} devices, each of" if each.num_devices > 1 else "a device,"
    weights = "an unknown size" if each.weight_bytes is None else _gib(each.weight_bytes)
    end = "vLLM measures at its start how much of the rest holds keys and values"
    if not each.fits:
        end = "they do not fit; raise tensor_parallel_size, or take a quantized model"
    return (
        f"{each.spec.id} (vLLM): {weights} of weights on {where} which gives "
        f"{_gib(each.bytes_of_each)}; {end}"
    )


def _together(plans: Sequence[ReplicaPlan], turns: TurnPolicyConfig | None) -> Iterator[str]:
    """Yield what several models on a CPU need together, and what to do if that is too much.

    Of models that take turns, only the largest set that has them at the same time counts, beside
    what others keep while they sleep.
    """
    if len(plans) < 2:
        return
    start = sum_at_once({plan.spec.id: plan.start_bytes for plan in plans}, turns)
    most = sum_at_once({plan.spec.id: plan.most_bytes for plan in plans}, turns)
    total = plans[0].device.total_bytes
    yield (
        f"Together on the CPU: {_gib(start)} needed at start, {_gib(most)} reserved at most, of "
        f"{_gib(total)}"
    )
    if most > total * (1 - HEADROOM):
        yield "When all are busy, memory runs out: set kv_cache_memory_bytes or lower max_num_seqs"


def _least_bytes(each: ReplicaPlan | Refusal) -> int:
    return each.least_bytes or 0 if isinstance(each, Refusal) else each.demand.least_bytes


def _rows(plan: ReplicaPlan) -> Mapping[str, str]:
    weights = plan.shape.weights
    counted = "about {}" if weights.is_estimate else "{}, counted in the files"
    rows = {
        "share": f"up to {_gib(plan.share_bytes)}"
        if plan.device.on_cpu
        else f"{plan.spec.device_share:g} = {_gib(plan.share_bytes)}",
        "weights": f"{_gib(plan.demand.weight_bytes)}",
        "": counted.format(
            f"{weights.total / 1e9:.2f}e9 in {plan.spec.entry.quantization or plan.dtype}"
        ),
        "a step": _gib(plan.demand.activation_bytes),
        "captured steps": _gib(plan.demand.graph_bytes),
        "context and headroom": _gib(plan.headroom_bytes),
        "keys and values": _gib(plan.kv.kv_bytes) if plan.demand.groups else "-",
        "left": _gib(plan.left_bytes),
        "needed at start": _gib(plan.start_bytes),
        "reserved at most": _gib(plan.most_bytes),
        "bytes of a token's keys and values": f"{plan.kv_token_bytes:,}"
        if plan.demand.groups
        else "-",
        "max_model_len": f"{plan.sizes.max_model_len:,}",
        "max_num_seqs": f"{plan.sizes.max_num_seqs:,}" if plan.demand.groups else "-",
        "max_batched_tokens": f"{plan.sizes.max_batched_tokens:,}",
    }
    for length in LENGTHS:
        number = plan.num_sequences(length)
        rows[f"sequences of {length // 1024}k tokens at once"] = str(number) if number else "-"
    return rows


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def as_json(
    found: Sequence[Planned],
    card: Card,
    turns: TurnPolicyConfig | None = None,
    sleeps: Mapping[str, Sleep] = MappingProxyType({}),
) -> str:
    """Return the plans and refusals, which models take turns, and when they sleep, as JSON."""
    pinned = pinned_of(found, sleeps)
    return json.dumps(
        {
            "device": {"total_bytes": card.memory.total_bytes, "is_gpu": card.num > 0},
            "models": [
                _as_dict(each)
                | {"last_start_s": last_start_s(each.spec), "last_wake_s": last_wake_s(each.spec)}
                | asdict(sleeps.get(each.spec.id, Sleep(None, None)))
                | {"pinned_bytes": pinned.get(each.spec.id, 0)}
                for each in found
            ],
            "turns": {} if turns is None else {name: [*ids] for name, ids in turns.groups.items()},
            "together": {} if turns is None else turns.together,
            "light": [] if turns is None else list(turns.light),
        },
        indent=2,
    )


def _as_dict(each: Planned) -> dict[str, Any]:
    if isinstance(each, MeasuredByVllm):
        return {
            "id": each.spec.id,
            "share": each.spec.device_share,
            "fits": each.fits,
            "engine": "vllm",
            "num_devices": each.num_devices,
            "weight_bytes": each.weight_bytes,
            "bytes_of_each": each.bytes_of_each,
        }
    if isinstance(each, Refusal):
        return {
            "id": each.spec.id,
            "share": each.spec.device_share,
            "fits": False,
            "error": each.message,
            "least_bytes": each.least_bytes,
        }
    return {
        "id": each.spec.id,
        "share": each.spec.device_share,
        "fits": True,
        "dtype": each.dtype,
        "num_weights": each.shape.weights.total,
        "is_estimate": each.shape.weights.is_estimate,
        "share_bytes": each.share_bytes,
        "weight_bytes": each.demand.weight_bytes,
        "step_bytes": each.demand.activation_bytes,
        "graph_bytes": each.demand.graph_bytes,
        "headroom_bytes": each.headroom_bytes,
        "kv_bytes": each.kv.kv_bytes,
        "left_bytes": each.left_bytes,
        "start_bytes": each.start_bytes,
        "most_bytes": each.most_bytes,
        "kv_token_bytes": each.kv_token_bytes,
        "least_bytes": each.demand.least_bytes,
        **asdict(each.sizes),
        "reasons": dict(each.reasons),
        "num_sequences": {str(length): each.num_sequences(length) for length in LENGTHS},
    }
