"""Prints how many sequences fit on a card, with memory for the full length of each, and by blocks.

Only the plan is computed, from configurations: no weights and no GPU. "full length" gives each
sequence memory for max_model_len tokens, whatever it needs. "live" plans blocks and counts the
sequences that run at once if each needs 2,048 tokens. Weights, a step and captured steps are
subtracted as for a replica with the whole card.

Run: python -m benchmarks.kv_plan
"""

import argparse
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen2Config

from deployments.plan.graph_sizes import MAX_GRAPHS
from deployments.plan.memory_budget import (
    GIB,
    DeviceMemoryError,
    KVPlan,
    MemoryDemand,
    plan_kv_blocks,
)
from deployments.plan.memory_demand import memory_demand
from deployments.plan.model_shape import ModelShape

LIVE_TOKENS = 2048
LENGTHS = (4096, 8192, 16_384, 32_768)
MAX_BATCHED_TOKENS = 2048

CARDS = {"H100 80 GB": 79.1, "A6000 48 GB": 47.4, "4090 24 GB": 23.5}
"""GiB of each card, about as torch reports them: the driver keeps some."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model in bfloat16, by its text configuration and the number of its weights."""

    config: PreTrainedConfig
    num_weights: int


MODELS = {
    # Source: config.json and the safetensors index of Qwen/Qwen2.5-7B-Instruct.
    "Qwen2.5-7B": Model(
        Qwen2Config(
            vocab_size=152_064,
            hidden_size=3584,
            intermediate_size=18_944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
        ),
        7_615_616_512,
    ),
    # Source: config.json and the safetensors index of meta-llama/Llama-3.1-8B-Instruct.
    "Llama-3.1-8B": Model(
        LlamaConfig(
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        ),
        8_030_261_248,
    ),
    # Source: config.json and the safetensors index of google/gemma-3-4b-it.
    "Gemma 3 4B": Model(
        Gemma3TextConfig(
            vocab_size=262_208,
            hidden_size=2560,
            intermediate_size=10_240,
            num_hidden_layers=34,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=1024,
            layer_types=[
                "sliding_attention" if layer % 6 else "full_attention" for layer in range(1, 35)
            ],
        ),
        4_300_079_472,
    ),
}


def demand_of(model: Model, max_model_len: int, max_num_seqs: int) -> MemoryDemand:
    """Return what a replica of the model needs."""
    return memory_demand(
        ModelShape.of(model.config),
        weight_bytes=2 * model.num_weights,
        dtype="bfloat16",
        step_dtype="bfloat16",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max(MAX_BATCHED_TOKENS, max_num_seqs),
        max_graphs=MAX_GRAPHS,
    )


def num_full(plan: KVPlan, demand: MemoryDemand, max_num_seqs: int) -> int:
    """Return how many sequences run if each takes memory for its full length, to the token."""
    full_bytes = sum(group.capacity * group.token_bytes for group in demand.groups)
    return min(max_num_seqs, (plan.share_bytes - demand.fixed_bytes) // full_bytes)


def num_live(plan: KVPlan, demand: MemoryDemand, max_num_seqs: int) -> int:
    """Return how many sequences of `LIVE_TOKENS` run at once."""
    return min(
        max_num_seqs,
        *(
            num_blocks // group.blocks_for(LIVE_TOKENS)
            for num_blocks, group in zip(plan.kv_blocks, demand.groups, strict=True)
        ),
    )


def _cell(model: Model, card_gib: float, max_model_len: int, max_num_seqs: int) -> str:
    demand = demand_of(model, max_model_len, max_num_seqs)
    try:
        plan = plan_kv_blocks(
            total_bytes=int(card_gib * GIB), share=1, demand=demand, max_num_seqs=max_num_seqs
        )
    except DeviceMemoryError:
        return "none"
    numbers = (count(plan, demand, max_num_seqs) for count in (num_full, num_live))
    return " -> ".join(map(str, numbers))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--max-num-seqs", type=int, default=512, help="sequences at most")
    args = parser.parse_args()
    table = Table(
        title=f"Sequences at once: full length -> live with {LIVE_TOKENS} tokens each, "
        f"{args.max_num_seqs} at most, by max_model_len"
    )
    for column in ("model", "card", *(f"{length // 1024}k" for length in LENGTHS)):
        table.add_column(column)
    for name, model in MODELS.items():
        for card, card_gib in CARDS.items():
            cells = (_cell(model, card_gib, length, args.max_num_seqs) for length in LENGTHS)
            table.add_row(name, card, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
