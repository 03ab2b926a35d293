from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.contract.model_spec import ModelConfig, ModelSpec
from deployments.plan.memory_budget import GIB, DeviceMemoryError, ModelTooLargeError
from deployments.plan.replica_plan import (
    ReplicaPlan,
    SequenceLengthError,
    plan_replica,
    shares_side_by_side,
)
from deployments.plan.sizes import CPU_KV_FRACTION, DeviceMemory, Sizes
from tests.hub_configs import shape_of

ROOT = Path(__file__).parents[3]
CPU = DeviceMemory(64 * GIB, on_cpu=True)


def spec(num_gpus: float = 1.0, **changes: Any) -> ModelSpec:
    entry = ModelConfig.model_validate({"id": "m", "source": "x", **changes})
    return ModelSpec(entry, "x", num_gpus)


def planned(name: str, gib: float, **changes: Any) -> ReplicaPlan:
    return plan_replica(
        spec(**changes),
        shape_of(name),
        DeviceMemory(int(gib * GIB)),
        is_pooler=name.startswith("radar"),
    )


@pytest.mark.parametrize("gib", [24, 48, 80])
def test_a_7b_model_runs_on_each_card_with_its_own_length(gib: int) -> None:
    plan = planned("qwen2.5-7b-instruct", gib)
    assert plan.sizes.max_model_len == 32_768
    assert plan.sizes.max_num_seqs >= 64
    assert plan.num_sequences(1024) >= 16
    assert plan.left_bytes >= 0
    assert dict(plan.reasons)["max_model_len"] == "the model's own limit"


def test_a_model_of_a_light_group_leaves_room_for_what_the_sleepers_keep_of_the_card() -> None:
    shape = shape_of("qwen2.5-7b-instruct")

    def usable_bytes(num_turns: int, foreign_gib: float = 0.0, *, on_cpu: bool = False) -> int:
        memory = DeviceMemory(80 * GIB, int(foreign_gib * GIB), on_cpu=on_cpu)
        member = replace(spec(num_gpus=0.5), turn_group="card", num_turns=num_turns)
        return plan_replica(member, shape, memory).kv.share_bytes

    assert usable_bytes(1) - usable_bytes(3) == pytest.approx(0.9 * GIB, abs=10)
    assert usable_bytes(3, 1.4) == usable_bytes(3), "what the sleepers keep is counted once"
    assert usable_bytes(3, on_cpu=True) == usable_bytes(1, on_cpu=True)


def test_a_12b_model_runs_on_cards_that_hold_it_with_the_length_that_fits() -> None:
    on_48, on_80 = planned("gemma-3-12b-it", 48), planned("gemma-3-12b-it", 80)
    assert 16_384 <= on_48.sizes.max_model_len < on_80.sizes.max_model_len <= 131_072
    assert dict(on_48.reasons)["max_model_len"] == "the longest that fits"
    # One token more would not leave room for keys beside a prompt with images.
    assert on_48.demand.activation_bytes < on_48.kv.kv_bytes


def test_a_12b_model_is_refused_on_a_card_that_cant_hold_it_with_the_size_that_can() -> None:
    with pytest.raises(DeviceMemoryError) as caught:
        planned("gemma-3-12b-it", 24)
    message = str(caught.value)
    assert "22.70 GiB for weights" in message
    assert message.endswith("; give it a device of 26.9 GiB")
    assert planned("gemma-3-12b-it", 27).num_sequences(2048) >= 1


def test_a_refused_share_names_the_one_that_does() -> None:
    with pytest.raises(DeviceMemoryError, match=r"\(or gpu_share\) to 0\.\d+$") as caught:
        planned("qwen2.5-7b-instruct", 48, num_gpus=0.3)
    least = float(str(caught.value).rsplit(maxsplit=1)[1])
    assert planned("qwen2.5-7b-instruct", 48, num_gpus=least).num_sequences(2048) >= 1


@pytest.mark.parametrize("gib", [22, 23.6, 24])
def test_a_length_that_was_chosen_is_chosen_anew_beside_the_loaded_model(gib: float) -> None:
    context = int(0.4 * GIB)
    before = plan_replica(
        spec(), shape_of("llama-3.1-8b-instruct"), DeviceMemory(int(gib * GIB), context)
    )
    # The context has grown while the model was loaded, and the longest length fitted exactly.
    after = before.with_weights(before.demand.weight_bytes, context + GIB // 10)
    assert 2048 <= after.sizes.max_model_len < before.sizes.max_model_len


def test_a_length_beyond_the_model_s_positions_is_refused() -> None:
    with pytest.raises(SequenceLengthError, match="but the model has 32768 positions; lower max_m"):
        planned("qwen2.5-7b-instruct", 80, max_model_len=200_000)


@pytest.mark.parametrize(
    ("changes", "gib", "why"),
    [
        ({"num_gpus": 0.75}, 24, "what the KV memory holds"),
        ({"max_batched_tokens": 40}, 80, "as many as a step has tokens"),
        ({}, 80, "the value for a GPU"),
    ],
)
def test_the_reason_for_the_number_of_sequences(
    changes: dict[str, Any], gib: int, why: str
) -> None:
    assert dict(planned("qwen2.5-7b-instruct", gib, **changes).reasons)["max_num_seqs"] == why


def test_a_text_model_s_length_is_not_bounded_by_its_step() -> None:
    plan = planned("qwen2.5-7b-instruct", 24, max_num_seqs=256, num_gpus=0.8)
    assert plan.sizes.max_model_len > 16_384


def test_given_sizes_are_kept() -> None:
    given = {"max_model_len": 5000, "max_num_seqs": 7, "max_batched_tokens": 333}
    plan = planned("qwen2.5-7b-instruct", 48, **given)
    assert plan.sizes == Sizes(5000, 7, 333)
    assert plan.reasons == ()


def test_no_more_sequences_run_than_a_step_has_tokens() -> None:
    assert planned("qwen2.5-7b-instruct", 80, max_batched_tokens=40).sizes.max_num_seqs == 40


def on_cpu(device: DeviceMemory = CPU, **changes: Any) -> ReplicaPlan:
    return plan_replica(spec(num_gpus=0, **changes), shape_of("llama-3.1-8b-instruct"), device)


def test_on_a_cpu_all_sequences_of_the_chosen_length_take_a_quarter_of_the_machine() -> None:
    plan = on_cpu()
    assert plan.sizes.max_num_seqs == 16
    assert 2048 < plan.sizes.max_model_len < 131_072
    assert 15 * GIB < plan.kv.kv_bytes <= CPU_KV_FRACTION * 64 * GIB == 16 * GIB
    assert plan.num_sequences(plan.sizes.max_model_len) == 16
    assert plan.demand.graph_bytes == 0
    assert "m: kv_cache_memory_bytes auto is 17179869184: a quarter of the machine's memory" in (
        plan.explanations
    )


SIXTY_FOUR: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 32_768}


def test_given_sizes_get_no_more_than_a_quarter_of_the_machine_unless_the_entry_says_so() -> None:
    plan = on_cpu(**SIXTY_FOUR)
    assert plan.kv.kv_bytes == 16 * GIB
    assert plan.start_bytes == plan.demand.fixed_bytes
    assert plan.most_bytes == plan.start_bytes + 16 * GIB

    more = on_cpu(**SIXTY_FOUR, kv_cache_memory_bytes=24 * GIB)
    assert more.kv.kv_bytes == 24 * GIB
    assert not any("kv_cache_memory_bytes" in line for line in more.explanations)
    all_free = on_cpu(**SIXTY_FOUR, kv_cache_memory_bytes=10**15)
    assert 0.9 * 64 * GIB - GIB < all_free.most_bytes <= 0.9 * 64 * GIB


def test_a_quarter_is_of_the_whole_machine_but_no_more_than_is_free() -> None:
    busy = replace(CPU, total_bytes=32 * GIB, whole_bytes=128 * GIB)
    plan = on_cpu(busy, **SIXTY_FOUR)
    assert plan.kv.kv_bytes < 32 * GIB
    assert plan.left_bytes < 2**30
    assert on_cpu(replace(busy, total_bytes=120 * GIB), **SIXTY_FOUR).kv.kv_bytes == 32 * GIB


def test_the_limit_on_keys_and_values_that_can_t_hold_a_sequence_names_the_one_that_does() -> None:
    with pytest.raises(ModelTooLargeError, match=r"raise kv_cache_memory_bytes to \d+,") as caught:
        on_cpu(**SIXTY_FOUR, kv_cache_memory_bytes=GIB)
    least = int(str(caught.value).split("kv_cache_memory_bytes to ")[1].split(",")[0])
    assert on_cpu(**SIXTY_FOUR, kv_cache_memory_bytes=least).num_sequences(32_768) == 1
    with pytest.raises(ModelTooLargeError):
        on_cpu(**SIXTY_FOUR, kv_cache_memory_bytes=least - 1)


def test_on_a_gpu_keys_and_values_are_allocated_at_the_start_up_to_the_given_limit() -> None:
    plan = planned("qwen2.5-7b-instruct", 48)
    assert plan.start_bytes == plan.most_bytes == plan.demand.fixed_bytes + plan.kv.kv_bytes
    limited = planned("qwen2.5-7b-instruct", 48, kv_cache_memory_bytes=4 * GIB)
    assert 3.9 * GIB < limited.kv.kv_bytes <= 4 * GIB < plan.kv.kv_bytes


@pytest.mark.parametrize("gib", [20, 21, 28])
def test_more_memory_on_a_cpu_gives_no_shorter_length(gib: int) -> None:
    device = replace(CPU, total_bytes=gib * GIB)
    lengths = [on_cpu(replace(device, total_bytes=n * GIB)).sizes.max_model_len for n in (gib, 64)]
    assert 2048 <= lengths[0] <= lengths[1]


def test_on_a_cpu_too_no_more_sequences_run_than_a_step_has_tokens() -> None:
    plan = plan_replica(
        spec(num_gpus=0, max_batched_tokens=8), shape_of("llama-3.1-8b-instruct"), CPU
    )
    assert plan.sizes.max_num_seqs == 8


def test_a_classifier_needs_no_keys_and_takes_texts_of_its_own_length() -> None:
    plan = planned("radar-vicuna-7b", 40)
    assert plan.sizes == Sizes(512, 1, 2048)
    assert plan.kv.kv_bytes == plan.kv_token_bytes == plan.num_sequences(100) == 0
    assert planned("radar-vicuna-7b", 40, max_model_len=4096).sizes.max_model_len == 512
    with pytest.raises(DeviceMemoryError, match=r"1\.32 GiB for weights and"):
        planned("radar-vicuna-7b", 1)


def test_the_loaded_weights_replace_the_estimate() -> None:
    plan = planned("qwen2.5-7b-instruct", 24)
    heavier = plan.with_weights(plan.demand.weight_bytes + GIB, 0)
    assert heavier.sizes == plan.sizes
    assert plan.kv.kv_bytes - heavier.kv.kv_bytes == pytest.approx(GIB, rel=0.05)
    with pytest.raises(DeviceMemoryError):
        plan.with_weights(22 * GIB, 0)


@pytest.mark.parametrize(
    ("needs", "left", "shares"),
    [([5], 1.0, [1.0]), ([30, 10], 1.0, [0.72, 0.27]), ([10, 10], 0.5, [0.25, 0.25])],
)
def test_shares_follow_needs(needs: list[int], left: float, shares: list[float]) -> None:
    assert shares_side_by_side(needs, left) == shares
