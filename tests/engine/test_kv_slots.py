import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig, Qwen2Config

from deployments.engine.kv_slots import KVShape, KVSlots
from deployments.engine.scheduler import SlotMove

SHAPE = KVShape(num_layers=2, num_kv_heads=1, head_dim=2, dtype=torch.float32)
NUM_SLOTS, LENGTH = 4, 7


def slots() -> KVSlots:
    return KVSlots(SHAPE, num_slots=NUM_SLOTS, max_model_len=LENGTH, device=torch.device("cpu"))


def write(kv: KVSlots, slot: int, start: int, marks: list[int]) -> None:
    """Write tokens whose keys and values tell layer and mark."""
    rows = torch.tensor(marks, dtype=torch.float32)[:, None, None].expand(-1, 1, 2)
    for layer in range(SHAPE.num_layers):
        kv.write(
            layer,
            torch.full((len(marks),), slot),
            torch.arange(start, start + len(marks)),
            rows + 1000 * layer,
            -rows - 1000 * layer,
        )


def assert_holds(kv: KVSlots, expected: dict[int, list[int]]) -> None:
    """Require exactly these marks in these slots, and zeros everywhere else."""
    for layer in range(SHAPE.num_layers):
        marks = torch.zeros(NUM_SLOTS, LENGTH)
        for slot, written in expected.items():
            marks[slot, : len(written)] = torch.tensor(written) + 1000 * layer
        stored = marks[:, :, None, None].expand(-1, -1, 1, 2)
        assert torch.equal(kv.keys[layer], stored)
        assert torch.equal(kv.values[layer], -stored)


def test_the_shape_is_read_from_a_models_configuration() -> None:
    grouped = Qwen2Config(
        num_hidden_layers=3, hidden_size=32, num_attention_heads=4, num_key_value_heads=2
    )
    assert KVShape.of(grouped, torch.bfloat16) == KVShape(3, 2, 8, torch.bfloat16)
    own_head_dim = Gemma3TextConfig(
        num_hidden_layers=3, hidden_size=32, head_dim=64, num_key_value_heads=1
    )
    assert KVShape.of(own_head_dim, torch.float32).head_dim == 64
    plain = LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4)
    assert KVShape.of(plain, torch.float32).num_kv_heads == 4


def test_bytes_are_those_of_the_tensors() -> None:
    # Qwen2-0.5B in bfloat16: 24 layers of 2 heads of 64.
    assert KVShape(24, 2, 64, torch.bfloat16).bytes_per_token == 12288
    kv = slots()
    assert kv.num_bytes == sum(t.numel() * t.element_size() for t in (*kv.keys, *kv.values))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, 3), st.integers(1, 3)),
            st.tuples(st.just("remove"), st.integers(0, 3), st.just(0)),
        ),
        max_size=25,
    )
)
def test_writes_and_moves_keep_every_sequence_and_leave_free_slots_clean(
    events: list[tuple[str, int, int]],
) -> None:
    kv, running, mark = slots(), list[list[int]](), 0
    for event, index, count in events:
        if event == "write":
            slot = min(index, len(running), NUM_SLOTS - 1)
            running += [[]] if slot == len(running) else []
            count = min(count, LENGTH - len(running[slot]))
            marks = [mark := mark + 1 for _ in range(count)]
            write(kv, slot, len(running[slot]), marks)
            running[slot] += marks
        elif index < len(running):
            kv.wipe(index, len(running[index]))
            last = running.pop()
            if index < len(running):
                running[index] = last
                kv.move(SlotMove(source=len(running), target=index, length=len(last)))
        assert_holds(kv, dict(enumerate(running)))


def test_one_call_writes_tokens_of_many_slots() -> None:
    kv = slots()
    rows = torch.arange(1.0, 4.0)[:, None, None].expand(-1, 1, 2)
    for layer in range(2):
        where = torch.tensor([2, 0, 2]), torch.tensor([1, 0, 0])
        kv.write(layer, *where, rows + 1000 * layer, -rows - 1000 * layer)
    assert_holds(kv, {0: [2], 2: [3, 1]})


def test_a_wiped_slot_holds_no_nan() -> None:
    kv = slots()
    kv.keys[1][3, 2] = torch.nan
    kv.values[0][3, 4] = torch.inf
    kv.wipe(3, 5)
    assert_holds(kv, {})


def test_a_stock_cache_is_loaded_and_its_sliding_layers_keep_their_places() -> None:
    config = Gemma3TextConfig(
        num_hidden_layers=2, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    )
    cache = DynamicCache(config=config)
    marks = torch.arange(1.0, 7.0).view(1, 1, 6, 1).expand(-1, -1, -1, 2)
    for layer in range(2):
        cache.update(marks, -marks, layer)
    kv = slots()
    kv.load(1, cache)
    whole = torch.arange(1.0, 7.0)
    assert torch.equal(kv.keys[1][1, :6, 0, 0], whole)
    assert torch.equal(kv.values[1][1, :6, 0, 0], -whole)
    # A window of 4 lets the next token see 3 others.
    assert torch.equal(kv.keys[0][1, 3:6, 0, 0], whole[3:])
    assert not kv.keys[0][0].any()
