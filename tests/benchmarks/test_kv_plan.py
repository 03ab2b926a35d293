"""What real models' plans hold, from their configurations."""

import pytest

from benchmarks.kv_plan import CARDS, LENGTHS, MODELS, demand_of, num_full, num_live
from deployments.plan.memory_budget import GIB, plan_kv_blocks


def counts(name: str, total_bytes: int, max_model_len: int, max_num_seqs: int) -> tuple[int, int]:
    """Return how many sequences run at their full length, and how many with 2,048 tokens."""
    demand = demand_of(MODELS[name], max_model_len, max_num_seqs)
    plan = plan_kv_blocks(
        total_bytes=total_bytes, share=1, demand=demand, max_num_seqs=max_num_seqs
    )
    return num_full(plan, demand, max_num_seqs), num_live(plan, demand, max_num_seqs)


def test_qwen_7b_holds_400_live_sequences_of_2k_on_80_gb_at_32k() -> None:
    full, live = counts("Qwen2.5-7B", 80 * 10**9, 32_768, 512)
    assert full < 32
    assert live >= 400


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("card", ["H100 80 GB", "A6000 48 GB"])
def test_live_sequences_do_not_depend_on_the_model_s_length(name: str, card: str) -> None:
    total_bytes = int(CARDS[card] * GIB)
    live = [counts(name, total_bytes, length, 512)[1] for length in LENGTHS]
    assert max(live) - min(live) <= 1


@pytest.mark.parametrize("card", CARDS)
def test_with_a_window_more_sequences_are_live_than_before_at_any_length(card: str) -> None:
    for length in LENGTHS:
        full, live = counts("Gemma 3 4B", int(CARDS[card] * GIB), length, 512)
        assert live > full
