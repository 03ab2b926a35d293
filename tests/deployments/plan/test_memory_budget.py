import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.plan.memory_budget import (
    GIB,
    OUTSIDE_BYTES,
    TYPICAL_TOKENS,
    DeviceMemoryError,
    GroupDemand,
    KVPlan,
    MemoryDemand,
    activation_bytes,
    plan_kv_blocks,
)

MIB = 2**20
BLOCK_SIZE = 256


def groups(*sizes: tuple[int, int]) -> tuple[GroupDemand, ...]:
    """Return groups of the given capacities and bytes of a block, the largest capacity first."""
    return tuple(
        GroupDemand(capacity, num_bytes // BLOCK_SIZE, BLOCK_SIZE) for capacity, num_bytes in sizes
    )


GROUPS = st.lists(
    st.builds(GroupDemand, st.integers(1, 6000), st.integers(1, 10), st.just(BLOCK_SIZE)),
    min_size=1,
    max_size=3,
    unique_by=lambda group: group.capacity,
).map(lambda made: tuple(sorted(made, key=lambda group: -group.capacity)))
DEMANDS = st.builds(
    MemoryDemand,
    weight_bytes=st.integers(0, 100_000),
    activation_bytes=st.integers(0, 100_000),
    groups=GROUPS,
)
SHARES = st.floats(0.01, 1)
NUM_SEQS = st.integers(1, 40)


def plan(total: int, share: float, demand: MemoryDemand, num_seqs: int) -> KVPlan:
    return plan_kv_blocks(total_bytes=total, share=share, demand=demand, max_num_seqs=num_seqs)


def total_for(demand: MemoryDemand, spare: int, share: float) -> int:
    """Return a device whose share holds one sequence and `spare` bytes, or a little more."""
    needed = demand.fixed_bytes + demand.sequence_bytes + spare
    return int((needed + 1) / (0.9 * share)) + 2  # a tenth of the share stays free


@pytest.mark.parametrize(
    ("total", "share", "usable"),
    [(80 * GIB, 0.5, 36 * GIB), (48 * GIB, 0.05, int(2.4 * GIB) - OUTSIDE_BYTES), (GIB, 0.2, 0)],
)
def test_a_small_share_leaves_room_for_what_is_outside_of_the_allocator(
    total: int, share: float, usable: int
) -> None:
    demand = MemoryDemand(0, 0, (), outside_bytes=OUTSIDE_BYTES)
    assert plan(total, share, demand, 1).share_bytes == usable


@given(st.integers(0, 2**34), st.sampled_from([0, OUTSIDE_BYTES]))
def test_the_least_share_holds_what_is_planned(planned: int, outside_bytes: int) -> None:
    demand = MemoryDemand(planned, 0, (), outside_bytes=outside_bytes)
    least = demand.least_bytes
    assert least - demand.headroom_bytes(least) >= planned
    smaller = least - 10
    assert smaller - demand.headroom_bytes(smaller) < planned


def holds(planned: KVPlan, demand: MemoryDemand, num_seqs: int, length: int) -> bool:
    return all(
        num_blocks >= num_seqs * group.blocks_for(length)
        for num_blocks, group in zip(planned.kv_blocks, demand.groups, strict=True)
    )


def held(planned: KVPlan, demand: MemoryDemand, most: int) -> tuple[int, int]:
    """Return how many sequences of a typical length fit, and how long they can be at once."""
    num_seqs = max(n for n in range(most + 1) if holds(planned, demand, n, TYPICAL_TOKENS))
    lengths = range(0, demand.groups[0].capacity + BLOCK_SIZE, BLOCK_SIZE)
    return num_seqs, max(n for n in lengths if holds(planned, demand, num_seqs, n))


def bytes_for(demand: MemoryDemand, num_seqs: int, length: int) -> int:
    return sum(
        max(group.blocks_for(group.capacity), num_seqs * group.blocks_for(length))
        * group.block_bytes
        for group in demand.groups
    )


def test_blocks_take_the_share_without_weights_and_a_step() -> None:
    demand = MemoryDemand(15 * GIB, GIB, groups((32_768, 2 * MIB)))
    # 80 GiB x 0.5, less a tenth, is 36 GiB; 20 GiB of them are left.
    planned = plan(80 * GIB, 0.5, demand, 256)
    assert planned == KVPlan(
        share_bytes=36 * GIB, kv_blocks=(10_240,), kv_bytes=20 * GIB, num_tokens=10_240 * BLOCK_SIZE
    )


def test_there_is_at_most_memory_for_as_many_full_sequences_as_may_run() -> None:
    demand = MemoryDemand(GIB, GIB, groups((32_768, MIB), (1000, MIB)))
    assert plan(80 * GIB, 1, demand, 8).kv_blocks == (8 * 128, 8 * 4)


def test_a_window_s_group_has_no_more_than_the_window_of_each_sequence() -> None:
    demand = MemoryDemand(0, 0, groups((32_768, MIB), (1024, MIB)))
    # 900 MiB for 8 sequences: 4 blocks of the window each, and the rest is for the other group.
    assert plan(1000 * MIB, 1, demand, 8).kv_blocks == (900 - 32, 32)


def test_short_memory_is_divided_for_fewer_sequences_rather_than_for_shorter_ones() -> None:
    # 198 MiB: 16 sequences of 2,048 tokens take 128 blocks and 64; the first group gets the rest.
    demand = MemoryDemand(0, 0, groups((32_768, MIB), (1024, MIB)))
    assert plan(220 * MIB, 1, demand, 512).kv_blocks == (134, 64)


@given(st.integers(0, 2_000_000), SHARES, DEMANDS, NUM_SEQS)
def test_a_plan_never_exceeds_its_share_and_holds_one_sequence_of_any_length(
    spare: int, share: float, demand: MemoryDemand, num_seqs: int
) -> None:
    total = total_for(demand, spare, share)
    planned = plan(total, share, demand, num_seqs)
    assert demand.fixed_bytes + planned.kv_bytes <= planned.share_bytes <= share * total
    for num_blocks, group in zip(planned.kv_blocks, demand.groups, strict=True):
        blocks_of_one = group.blocks_for(group.capacity)
        assert blocks_of_one <= num_blocks <= num_seqs * blocks_of_one
    assert planned.num_tokens == planned.kv_blocks[0] * BLOCK_SIZE


@given(st.integers(0, 2_000_000), SHARES, DEMANDS, NUM_SEQS)
def test_what_is_left_holds_no_more_or_longer_sequences_and_no_block_of_the_first_group(
    spare: int, share: float, demand: MemoryDemand, most: int
) -> None:
    planned = plan(total_for(demand, spare, share), share, demand, most)
    budget_bytes = planned.share_bytes - demand.fixed_bytes
    first = demand.groups[0]
    if planned.kv_blocks[0] < most * first.blocks_for(first.capacity):
        assert budget_bytes - planned.kv_bytes < first.block_bytes
    num_seqs, length = held(planned, demand, most)
    if num_seqs < most:
        assert bytes_for(demand, num_seqs + 1, TYPICAL_TOKENS) > budget_bytes
    elif length < first.capacity:
        assert bytes_for(demand, most, length + 1) > budget_bytes


@given(st.integers(0, 2_000_000), SHARES, SHARES, DEMANDS, NUM_SEQS)
def test_more_share_never_gives_room_for_fewer_or_shorter_sequences_only(
    spare: int, share: float, other: float, demand: MemoryDemand, most: int
) -> None:
    total = total_for(demand, spare, min(share, other))
    small = plan(total, min(share, other), demand, most)
    large = plan(total, max(share, other), demand, most)
    assert held(small, demand, most)[0] <= held(large, demand, most)[0]
    if held(small, demand, most)[0] == most:
        assert held(small, demand, most)[1] <= held(large, demand, most)[1]
    assert small.kv_bytes < large.kv_bytes + demand.groups[0].block_bytes


@given(DEMANDS, NUM_SEQS)
def test_less_than_one_sequence_is_an_error(demand: MemoryDemand, num_seqs: int) -> None:
    total = int((demand.fixed_bytes + demand.sequence_bytes - 1) / 0.9)
    with pytest.raises(DeviceMemoryError):
        plan(total, 1, demand, num_seqs)


def test_the_error_says_what_is_needed_and_what_to_change() -> None:
    demand = MemoryDemand(15 * GIB, GIB, groups((32_768, 16 * MIB)))
    with pytest.raises(DeviceMemoryError) as caught:
        plan(24 * GIB, 0.5, demand, 8)
    message = str(caught.value)
    for part in ("0.5 of 24.00 GiB", "10.80 GiB", "15.00 GiB for weights", "2.00 GiB for one"):
        assert part in message
    assert message.endswith("; raise num_gpus (or gpu_share) to 0.84")  # 18 GiB, and a tenth
    assert caught.value.least_bytes == 20 * GIB
    assert "\n" not in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_the_least_memory_that_an_error_names_holds_one_sequence() -> None:
    demand = MemoryDemand(15 * GIB, GIB, groups((32_768, 16 * MIB)))
    planned = plan(demand.least_bytes, 1, demand, 8)
    assert planned.kv_bytes == demand.sequence_bytes
    assert planned.num_tokens == 32_768


def test_the_error_offers_smaller_steps_only_if_the_weights_fit() -> None:
    demand = MemoryDemand(10 * GIB, GIB, groups((32_768, 16 * MIB)))
    with pytest.raises(DeviceMemoryError) as caught:
        plan(24 * GIB, 0.5, demand, 8)
    told = re.search(r"raise num_gpus .* to 0\.\d+, or lower max_model_len", str(caught.value))
    assert told is not None


def test_the_error_names_the_device_that_would_do() -> None:
    with pytest.raises(DeviceMemoryError, match=r"give it a device of 20\.0 GiB$"):
        plan(10 * GIB, 1, MemoryDemand(15 * GIB, GIB, groups((32_768, 16 * MIB))), 8)


def test_a_model_without_keys_gets_no_blocks() -> None:
    assert plan(10 * GIB, 1, MemoryDemand(GIB, GIB, ()), 1).kv_blocks == ()


def test_a_step_is_sized_by_its_tokens_and_by_the_logits_of_its_sequences() -> None:
    sizes = {"hidden_size": 100, "intermediate_size": 300, "vocab_size": 1000, "itemsize": 2}
    tokens_alone = activation_bytes(max_batched_tokens=10, num_seqs=0, **sizes)
    assert tokens_alone == 10 * (4 * 100 + 3 * 300) * 2
    assert activation_bytes(max_batched_tokens=0, num_seqs=5, **sizes) == 5 * 5 * 1000 * 4
