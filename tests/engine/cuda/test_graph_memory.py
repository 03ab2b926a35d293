from deployments.engine.cuda.decode_buckets import MAX_GRAPHS
from deployments.engine.memory import memory_demand
from deployments.gpu.budget import GRAPH_LAYER_BYTES
from tests.engine.tiny_models import load, qwen2


def planned(*, max_num_seqs: int, max_model_len: int = 96, max_graphs: int = MAX_GRAPHS) -> int:
    return memory_demand(
        load(qwen2),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=24,
        max_graphs=max_graphs,
    ).graph_bytes


def test_each_size_of_step_is_planned_for() -> None:
    one, four = planned(max_num_seqs=1), planned(max_num_seqs=4)
    # Of 3 layers each: 1 row; then 1, 2 and 4.
    assert 0 < one - 3 * GRAPH_LAYER_BYTES < 10_000
    assert 0 < four - 3 * 3 * GRAPH_LAYER_BYTES < 40_000
    assert planned(max_num_seqs=1, max_model_len=1000) - one == 2 * 3 * GRAPH_LAYER_BYTES


def test_no_more_graphs_are_planned_for_than_are_kept() -> None:
    most = planned(max_num_seqs=256, max_model_len=32_768)
    assert most - planned(max_num_seqs=256, max_model_len=4096) == 0
    assert most >= MAX_GRAPHS * 3 * GRAPH_LAYER_BYTES


def test_nothing_is_planned_where_nothing_is_captured() -> None:
    assert planned(max_num_seqs=4, max_graphs=0) == 0
