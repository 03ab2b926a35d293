from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen2_5_VLConfig

from deployments.engine.attention.kv_cache import KVCache, KVShape
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel
from deployments.engine.replay.cuda_mixed import MixedSteps
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.plan.graph_sizes import MAX_GRAPHS, DecodeBuckets
from deployments.plan.kv_layout import BLOCK_SIZE, KVLayout
from deployments.plan.memory_budget import (
    GRAPH_LAYER_BYTES,
    OUTSIDE_BYTES,
    PENALTY_ENTRY_BYTES,
    GroupDemand,
    MemoryDemand,
    penalty_bytes,
)
from deployments.plan.memory_demand import memory_demand
from deployments.plan.model_shape import ModelShape
from tests.engine.collector import image_request, sized_image_request
from tests.engine.tiny_models import byte_tokenizer, gemma3, load, mistral, qwen2, qwen2_5_vl


def demand(loaded: LoadedModel, **changes: Any) -> MemoryDemand:
    sizes: dict[str, Any] = {
        "max_model_len": 96,
        "max_num_seqs": 3,
        "max_batched_tokens": 24,
        **changes,
    }
    return memory_demand(
        ModelShape.of(loaded.text_config),
        weight_bytes=loaded.num_weight_bytes,
        **{"dtype": "float32", "step_dtype": "float32", **sizes},
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


def test_a_prompt_with_images_pays_for_its_cache_its_masks_and_repeated_keys() -> None:
    shape = ModelShape.of(load(gemma3).model.config)
    assert len(set(shape.windows)) == 2  # a mask for layers with a window, and one for the others

    def step_bytes(shape: ModelShape, num_tokens: int) -> int:
        return memory_demand(
            shape,
            weight_bytes=0,
            dtype="bfloat16",
            step_dtype="bfloat16",
            max_model_len=num_tokens,
            max_num_seqs=3,
            max_batched_tokens=num_tokens,
        ).activation_bytes

    text = replace(shape, has_images=False)
    for num_tokens in (1000, 8192):
        found = step_bytes(shape, num_tokens) - step_bytes(text, num_tokens)
        repeated = 2 * num_tokens * shape.num_heads * shape.head_dim * 2
        cached = sum(min(window or num_tokens, num_tokens) for window in shape.windows)
        cache = cached * 2 * shape.num_kv_heads * shape.head_dim * 2
        assert found - repeated - cache == num_tokens**2 * (1 + 1 + 2)


@pytest.mark.parametrize(
    ("make_model", "request_of", "num_masks"),
    [(gemma3, image_request, 2), (qwen2_5_vl, sized_image_request, 0)],
)
def test_transformers_makes_as_many_masks_as_are_planned(
    make_model: Callable[[], PreTrainedModel],
    request_of: Callable[..., SequenceRequest],
    num_masks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load(make_model).model
    asked = list[bool | None]()
    right = scaled_dot_product_attention

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
        if attn_mask is not None:
            masks[attn_mask.data_ptr()] = attn_mask
            asked.append(key.shape[1] == query.shape[1])
        return right(query, key, value, attn_mask=attn_mask, **options)

    masks = dict[int, torch.Tensor]()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(model.config.get_text_config(), "_attn_implementation", "sdpa")
    request = request_of("a", Random(0), num_images=2)
    num_tokens = len(request.prompt_token_ids)
    with torch.inference_mode():
        model(input_ids=torch.tensor([request.prompt_token_ids]), **request.model_inputs)
    assert len(masks) == num_masks
    assert all(mask.shape[-2:] == (num_tokens, num_tokens) for mask in masks.values())
    assert all(asked), "with a mask, keys are repeated to the heads of the queries"


def test_a_gpu_pays_for_the_tokens_that_penalties_count() -> None:
    loaded = load(qwen2)
    on_cpu, on_gpu = (demand(loaded, on_gpu=on_gpu) for on_gpu in (False, True))
    assert on_gpu.activation_bytes - on_cpu.activation_bytes == 3 * 96 * (8 + PENALTY_ENTRY_BYTES)
    assert (on_cpu.outside_bytes, on_gpu.outside_bytes) == (0, OUTSIDE_BYTES)


def test_penalties_are_applied_to_so_many_tokens_at_once_or_to_one_long_row() -> None:
    for num_seqs, num_tokens, at_once in ((256, 100_000, 2**20), (4, 2**21, 2**21)):
        found = penalty_bytes(num_seqs=num_seqs, max_model_len=num_tokens, vocab_size=2**22)
        assert found == num_seqs * num_tokens * 8 + at_once * PENALTY_ENTRY_BYTES


def test_images_of_any_size_may_need_more_in_the_tower_than_in_the_text_model() -> None:
    config = Qwen2_5_VLConfig(
        text_config={"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 2},
        vision_config={"hidden_size": 1280, "out_hidden_size": 2048},
    )
    shape = ModelShape.of(config)
    patch = 4 * 1280 + 3 * 3420 + 3 * (3 * 2 * 14 * 14)
    assert shape.image_token_elements == 4 * patch
    found = memory_demand(
        shape,
        weight_bytes=0,
        dtype="bfloat16",
        step_dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=1,
        max_batched_tokens=512,
    )
    assert found.activation_bytes == 4096 * 4 * patch * 2


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
        load(qwen2), max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_graphs=max_graphs
    ).graph_bytes


def test_graph_memory_covers_each_size_of_step() -> None:
    one, four = planned_graphs(max_num_seqs=1), planned_graphs(max_num_seqs=4)
    # 3 layers each: one graph of 1 row; then graphs of 1, 2 and 4 rows.
    assert 0 < one - 3 * GRAPH_LAYER_BYTES < 10_000
    assert 0 < four - 3 * 3 * GRAPH_LAYER_BYTES < 40_000
    assert planned_graphs(max_num_seqs=1, max_model_len=1000) - one == 2 * 3 * GRAPH_LAYER_BYTES


@pytest.mark.parametrize(
    ("max_num_seqs", "max_batched_tokens", "num_graphs"),
    [(1, 24, 1 + 1), (4, 500, 3 + 6), (256, 2048, 27 + 8), (512, 2048, 35 + 8)],
)
def test_graphs_are_planned_as_they_are_captured_where_flash_attention_reads(
    max_num_seqs: int, max_batched_tokens: int, num_graphs: int
) -> None:
    loaded = load(qwen2)
    layout = KVLayout((512,), (4,))
    shape = KVShape.of(loaded.text_config, torch.bfloat16)
    kv = KVCache(
        shape, layout, max_model_len=512, device=torch.device("meta"), reads_by_length=True
    )
    sizes = [*DecodeBuckets(max_num_seqs, 512, is_by_length=True).with_length(1)]
    captured = len(sizes) + len(MixedSteps(kv, max_num_seqs, max_batched_tokens).sizes)
    found = demand(
        loaded,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        max_graphs=MAX_GRAPHS,
    ).graph_bytes
    assert found // (3 * GRAPH_LAYER_BYTES) >= captured == num_graphs
    pool = found - captured * 3 * GRAPH_LAYER_BYTES
    rows = max(max_num_seqs, {24: 64, 500: 512}.get(max_batched_tokens, 1024))
    config = loaded.text_config
    assert pool >= rows * (4 * config.hidden_size + 3 * config.intermediate_size) * 4


def test_graph_memory_covers_no_more_graphs_than_are_kept() -> None:
    most = planned_graphs(max_num_seqs=256, max_model_len=32_768)
    assert most - planned_graphs(max_num_seqs=256, max_model_len=4096) == 0
    assert most >= MAX_GRAPHS * 3 * GRAPH_LAYER_BYTES


def test_without_captures_no_graph_memory_is_planned() -> None:
    assert planned_graphs(max_num_seqs=4, max_graphs=0) == 0
