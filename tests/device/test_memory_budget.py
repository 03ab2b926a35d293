import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.device.memory_budget import (
    GIB,
    DeviceMemoryError,
    KVPlan,
    MemoryDemand,
    activation_bytes,
    plan_kv_slots,
)

DEMANDS = st.builds(
    MemoryDemand,
    weight_bytes=st.integers(0, 40 * GIB),
    activation_bytes=st.integers(0, 4 * GIB),
    slot_bytes=st.integers(1, 4 * GIB),
)
TOTALS = st.integers(1, 96 * GIB)
SHARES = st.floats(0.01, 1)
NUM_SEQS = st.integers(1, 512)


def plan(total: int, share: float, demand: MemoryDemand, num_seqs: int) -> KVPlan | None:
    try:
        return plan_kv_slots(total_bytes=total, share=share, demand=demand, max_num_seqs=num_seqs)
    except DeviceMemoryError:
        return None


def test_slots_take_the_share_without_weights_and_a_step() -> None:
    demand = MemoryDemand(weight_bytes=15 * GIB, activation_bytes=GIB, slot_bytes=GIB // 2)
    # 80 GiB x 0.5, less a tenth, is 36 GiB; 20 GiB of them are left.
    planned = plan_kv_slots(total_bytes=80 * GIB, share=0.5, demand=demand, max_num_seqs=256)
    assert planned == KVPlan(share_bytes=36 * GIB, num_slots=40, slot_bytes=GIB // 2)
    assert planned.kv_bytes == 20 * GIB


def test_there_are_at_most_as_many_slots_as_sequences_may_run() -> None:
    demand = MemoryDemand(GIB, GIB, GIB)
    planned = plan_kv_slots(total_bytes=80 * GIB, share=1, demand=demand, max_num_seqs=8)
    assert planned.num_slots == 8


@given(st.integers(0, 40 * GIB), SHARES, DEMANDS, NUM_SEQS)
def test_a_plan_never_exceeds_its_share(
    spare: int, share: float, demand: MemoryDemand, num_seqs: int
) -> None:
    # A tenth of the share stays free, and bytes are rounded; so at least one slot fits.
    needed = demand.weight_bytes + demand.activation_bytes + demand.slot_bytes
    total = int((needed + spare + 1) / (0.9 * share)) + 2
    planned = plan(total, share, demand, num_seqs)
    assert planned is not None
    used = demand.weight_bytes + demand.activation_bytes + planned.kv_bytes
    assert used <= planned.share_bytes <= share * total
    assert 1 <= planned.num_slots <= num_seqs


@given(TOTALS, SHARES, DEMANDS, NUM_SEQS)
def test_the_rest_would_not_hold_another_slot(
    total: int, share: float, demand: MemoryDemand, num_seqs: int
) -> None:
    planned = plan(total, share, demand, num_seqs)
    num_slots = planned.num_slots if planned else 0
    if num_slots < num_seqs:
        used = demand.weight_bytes + demand.activation_bytes + (num_slots + 1) * demand.slot_bytes
        assert used > int(total * share * 0.9)


@given(TOTALS, SHARES, SHARES, DEMANDS, NUM_SEQS)
def test_more_share_never_gives_fewer_slots(
    total: int, share: float, other: float, demand: MemoryDemand, num_seqs: int
) -> None:
    small = plan(total, min(share, other), demand, num_seqs)
    large = plan(total, max(share, other), demand, num_seqs)
    assert (small.num_slots if small else 0) <= (large.num_slots if large else 0)


def test_the_error_says_what_is_needed_and_what_to_change() -> None:
    demand = MemoryDemand(weight_bytes=15 * GIB, activation_bytes=GIB, slot_bytes=2 * GIB)
    with pytest.raises(DeviceMemoryError) as caught:
        plan_kv_slots(total_bytes=24 * GIB, share=0.5, demand=demand, max_num_seqs=8)
    message = str(caught.value)
    for part in ("0.5 of 24.00 GiB", "10.80 GiB", "15.00 GiB for weights", "2.00 GiB for one"):
        assert part in message
    assert re.search("raise num_gpus .*lower max_model_len or max_batched_tokens", message)
    assert "\n" not in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_a_step_is_sized_by_its_tokens_and_by_the_logits_of_its_sequences() -> None:
    sizes = {"hidden_size": 100, "intermediate_size": 300, "vocab_size": 1000, "itemsize": 2}
    tokens_alone = activation_bytes(max_batched_tokens=10, num_seqs=0, **sizes)
    assert tokens_alone == 10 * (4 * 100 + 3 * 300) * 2
    assert activation_bytes(max_batched_tokens=0, num_seqs=5, **sizes) == 5 * 5 * 1000 * 4
