"""LoRA adapters of a model: their files, and what vLLM is told of them.

All of a model's adapters are loaded before its replica serves, and stay in memory. vLLM could load
one with the first request that names it, but an adapter that it can't load then ends the engine
with all its streams.

Only safetensors are read, though vLLM would take pickled weights, too.

Source: vllm/lora/ of vLLM 0.32; peft's adapter_config.json
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from transformers.utils.hub import cached_file

from deployments.contract.model_spec import AdapterConfig, ModelSpec
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.contract.vllm_args import LoraRank, VllmArgs

CONFIG_FILE: Final = "adapter_config.json"
WEIGHT_FILE: Final = "adapter_model.safetensors"

RANKS: Final[tuple[int, ...]] = get_args(LoraRank)
"""The values of vLLM's `max_lora_rank`."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter whose files are here.

    Attributes:
        id: The name that clients use.
        number: vLLM's own name, from 1 on.
        folder: Where its files are.
        rank: The rank of its matrices.
    """

    id: str
    number: int
    folder: Path
    rank: int


def read_adapters(spec: ModelSpec) -> tuple[Adapter, ...]:
    """Find a model's adapters; those on the hub are downloaded.

    Raises:
        UnsupportedModelError: One can't be served; one line says why.
    """
    return tuple(_read(each, number) for number, each in enumerate(spec.entry.adapters, start=1))


def _read(adapter: AdapterConfig, number: int) -> Adapter:
    config = _file_of(adapter, CONFIG_FILE)
    _file_of(adapter, WEIGHT_FILE)
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
        kind, rank = found.get("peft_type"), found.get("r")
    except (ValueError, AttributeError) as error:
        raise _refusal(adapter, f"its {CONFIG_FILE} is damaged") from error
    if kind != "LORA" or not isinstance(rank, int):
        raise _refusal(adapter, f"its {CONFIG_FILE} is of no LoRA adapter (peft_type: {kind})")
    if not 0 < rank <= RANKS[-1]:
        raise _refusal(adapter, f"its rank is {rank}; vLLM runs ranks up to {RANKS[-1]}")
    return Adapter(adapter.id, number, config.parent, rank)


def _file_of(adapter: AdapterConfig, name: str) -> Path:
    try:
        path = cached_file(adapter.source, name, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise _refusal(adapter, "there is no such folder or repository") from error
    if path is None:
        raise _refusal(adapter, f"it has no {name}")
    return Path(path)


def _refusal(adapter: AdapterConfig, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"can't load the adapter {adapter.id!r} ({adapter.source}): {why}")


def adapter_arguments(
    adapters: Sequence[Adapter], given: VllmArgs, *, on_cpu: bool
) -> dict[str, Any]:
    """Return vLLM's arguments for a model's adapters; what the entry gives holds if it can.

    Args:
        adapters: The adapters.
        given: The entry's `engine_args`.
        on_cpu: Whether the model runs on the CPU.

    Raises:
        UnsupportedModelError: The entry's `max_lora_rank` is too low.
    """
    if not adapters:
        return {}
    rank, at_most = max(each.rank for each in adapters), given.max_lora_rank
    if at_most is not None and rank > at_most:
        raise UnsupportedModelError(
            f"engine_args: max_lora_rank is {at_most}, and an adapter has the rank {rank}"
        )
    num_slots = given.max_loras or len(adapters)
    if on_cpu:
        # There, rows without an adapter get what is in the last slot: index -1 of a tensor. So it
        # stays empty. Source: vllm/lora/ops/torch_ops/lora_ops.py
        num_slots = max(num_slots, len(adapters)) + 1
    return {
        "enable_lora": True,
        "max_lora_rank": at_most or next(each for each in RANKS if each >= rank),
        "max_loras": num_slots,
        # An adapter that has been dropped would be read again with a request.
        "max_cpu_loras": max(len(adapters), num_slots, given.max_cpu_loras or 0),
    }
