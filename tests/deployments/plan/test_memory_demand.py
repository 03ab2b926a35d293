from collections.abc import Callable

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel
from deployments.plan.graph_sizes import MAX_GRAPHS
from deployments.plan.kv_layout import BLOCK_SIZE
from deployments.plan.memory_budget import GRAPH_LAYER_BYTES, GroupDemand, MemoryDemand
from deployments.plan.memory_demand import memory_demand
from deployments.plan.model_shape import ModelShape
from tests.engine.tiny_models import (
    byte_tokenizer,
    gemma3,
    load,
    mistral,
    qwen2,
)


def demand(loaded: LoadedModel, **changes: int) -> MemoryDemand:
    sizes = {"max_model_len": 96, "max_num_seqs": 3, "max_batched_tokens": 24, **changes}
    return memory_demand(
        ModelShape.of(loaded.text_config),
        weight_bytes=loaded.num_weight_bytes,
        dtype="float32",
        step_dtype="float32",
        **sizes,
    )


@pytest.mark.parametrize("make_model", [qwen2, mistral, gemma3])
def test_blocks_are_as_large_as_the_engine_makes_them(
    make_model: Callable[[], PreTrainedModel],
) -> None:
    loaded = load(make_model)
    engine = Engine(loaded, EngineLimits(max_num_seqs=3, max_model_len=960, max_batched_tokens=24))
    groups = demand(loaded, max_model_len=960).groups
    assert tuple(group.capacity for group in groups) == engine.layout.capacities
    blocks = zip(engine.layout.num_blocks, groups, strict=True)
    assert sum(number * group.block_bytes for number, group in blocks) == engine.kv_bytes


def test_layers_with_a_window_need_no_more_than_their_window() -> None:
    # A window of 7 in all 3 layers, each with 2 heads of 8 for keys and for values, in float32.
    assert demand(load(mistral)).groups == (GroupDemand(7, 3 * 2 * 2 * 8 * 4, BLOCK_SIZE),)


def test_weight_bytes_are_those_of_the_model() -> None:
    loaded = load(qwen2)
    assert demand(loaded).weight_bytes == loaded.num_weight_bytes


def test_activations_grow_with_the_tokens_and_sequences_of_a_step() -> None:
    loaded = load(qwen2)
    small = demand(loaded).activation_bytes
    assert demand(loaded, max_batched_tokens=48).activation_bytes > small
    assert demand(loaded, max_num_seqs=6).activation_bytes > small
    assert demand(loaded, max_model_len=960).activation_bytes == small


def test_a_model_with_images_may_run_a_step_of_its_full_length() -> None:
    shape = ModelShape.of(load(gemma3).model.config)
    assert shape.has_images

    def step_bytes(max_batched_tokens: int) -> int:
        return memory_demand(
            shape,
            weight_bytes=0,
            dtype="float32",
            step_dtype="float32",
            max_model_len=96,
            max_num_seqs=3,
            max_batched_tokens=max_batched_tokens,
        ).activation_bytes

    assert step_bytes(24) == step_bytes(96) < step_bytes(97)


def test_a_missing_intermediate_size_counts_as_four_times_the_hidden_size() -> None:
    config = GPT2Config(
        vocab_size=300, n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=1
    )
    loaded = LoadedModel(GPT2LMHeadModel(config), byte_tokenizer(), None, frozenset())
    assert demand(loaded).activation_bytes == 24 * (4 + 3 * 4) * 32 * 4 + 5 * 3 * 300 * 4


def planned_graphs(
    *, max_num_seqs: int, max_model_len: int = 96, max_graphs: int = MAX_GRAPHS
) -> int:
    return demand(
        load(qwen2),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_graphs=max_graphs,
    ).graph_bytes


def test_graph_memory_covers_each_size_of_step() -> None:
    one, four = planned_graphs(max_num_seqs=1), planned_graphs(max_num_seqs=4)
    # 3 layers each: one graph of 1 row; then graphs of 1, 2 and 4 rows.
    assert 0 < one - 3 * GRAPH_LAYER_BYTES < 10_000
    assert 0 < four - 3 * 3 * GRAPH_LAYER_BYTES < 40_000
    assert planned_graphs(max_num_seqs=1, max_model_len=1000) - one == 2 * 3 * GRAPH_LAYER_BYTES


def test_graph_memory_covers_no_more_graphs_than_are_kept() -> None:
    most = planned_graphs(max_num_seqs=256, max_model_len=32_768)
    assert most - planned_graphs(max_num_seqs=256, max_model_len=4096) == 0
    assert most >= MAX_GRAPHS * 3 * GRAPH_LAYER_BYTES


def test_without_captures_no_graph_memory_is_planned() -> None:
    assert planned_graphs(max_num_seqs=4, max_graphs=0) == 0
