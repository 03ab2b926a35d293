"""Estimates how much device memory a model needs, from its configuration and its weights' size."""

from typing import TYPE_CHECKING

import torch

from deployments.compute.cpu.linear.quantization import is_quantized
from deployments.device.memory_budget import (
    GroupDemand,
    MemoryDemand,
    activation_bytes,
    graph_bytes,
)
from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.kv_layout import BLOCK_SIZE
from deployments.engine.model.loader import LoadedModel
from deployments.engine.replay.graph_sizes import DecodeBuckets

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def memory_demand(
    loaded: LoadedModel,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    max_graphs: int = 0,
) -> MemoryDemand:
    """Return the memory that a loaded model needs for steps of a given size.

    A prompt with images can't be split into chunks, so a model that takes images may run a step of
    max_model_len tokens. Int8 layers compute in float32 whatever the model's dtype is.

    Args:
        loaded: The model.
        max_model_len: The most tokens of a sequence.
        max_num_seqs: Sequences that run at the same time.
        max_batched_tokens: Tokens per step.
        max_graphs: The most captured decode steps that are kept; 0 if none are captured.
    """
    if loaded.processor is not None:
        max_batched_tokens = max(max_batched_tokens, max_model_len)
    return demand_of_config(
        loaded.text_config,
        weight_bytes=loaded.num_weight_bytes,
        dtype=loaded.model.dtype,
        step_dtype=torch.float32 if is_quantized(loaded.model) else loaded.model.dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        max_graphs=max_graphs,
    )


def demand_of_config(
    config: "PreTrainedConfig",
    *,
    weight_bytes: int,
    dtype: torch.dtype,
    step_dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    max_graphs: int = 0,
) -> MemoryDemand:
    """Return the memory that a model needs, from its text configuration.

    Args:
        config: The text configuration.
        weight_bytes: The weights.
        dtype: Type of the model, of its keys and values, and of its logits.
        step_dtype: Type in which its layers compute.
        max_model_len: The most tokens of a sequence.
        max_num_seqs: Sequences that run at the same time.
        max_batched_tokens: Tokens per step.
        max_graphs: The most captured decode steps that are kept; 0 if none are captured.
    """

    def step_bytes(num_tokens: int, num_seqs: int) -> int:
        return activation_bytes(
            max_batched_tokens=num_tokens,
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            vocab_size=config.vocab_size,
            num_seqs=num_seqs,
            itemsize=step_dtype.itemsize,
        )

    shape = KVShape.of(config, dtype)
    captured_bytes = 0
    if max_graphs:
        buckets = DecodeBuckets(max_num_seqs, max(shape.capacities(max_model_len)))
        num_logits = max_num_seqs * config.vocab_size
        captured_bytes = graph_bytes(
            num_graphs=min(max_graphs, buckets.num_sizes),
            num_layers=config.num_hidden_layers,
            # A captured step's logits stay in the model's dtype until the step ends.
            decode_bytes=step_bytes(max_num_seqs, 0) + num_logits * dtype.itemsize,
            num_logits=num_logits,
            itemsize=dtype.itemsize,
        )
    return MemoryDemand(
        weight_bytes=weight_bytes,
        activation_bytes=step_bytes(max_batched_tokens, max_num_seqs),
        groups=_groups(shape, max_model_len),
        graph_bytes=captured_bytes,
    )


def _groups(shape: KVShape, max_model_len: int) -> tuple[GroupDemand, ...]:
    capacities = shape.group_capacities(max_model_len)
    token_bytes = shape.group_token_bytes(max_model_len)
    return tuple(
        GroupDemand(capacity, num_bytes, BLOCK_SIZE)
        for capacity, num_bytes in zip(capacities, token_bytes, strict=True)
    )
