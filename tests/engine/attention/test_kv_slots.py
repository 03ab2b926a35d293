from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from deployments.engine.attention import kv_slots
from deployments.engine.attention.kv_slots import KVShape, KVSlots, ring_slices
from deployments.engine.scheduling.slot_edits import SlotCopy, SlotEdit, SlotSwap, SlotWipe

WINDOW = 4
SHAPE = KVShape(windows=(WINDOW, None), num_kv_heads=1, head_dim=2, dtype=torch.float32)
NUM_SLOTS, LENGTH = 4, 7


def slots() -> KVSlots:
    return KVSlots(SHAPE, num_slots=NUM_SLOTS, max_model_len=LENGTH, device=torch.device("cpu"))


def rows(layer: int, marks: list[int]) -> torch.Tensor:
    """Return keys that encode layer and mark."""
    tensor = torch.tensor(marks, dtype=torch.float32) + 1000 * layer
    return tensor[:, None, None].expand(-1, 1, 2)


def write(kv: KVSlots, slot: int, start: int, marks: list[int]) -> None:
    for layer in range(2):
        kv.write_chunk(layer, slot, start, rows(layer, marks), -rows(layer, marks))


def assert_holds(kv: KVSlots, expected: dict[int, list[int]]) -> None:
    """Require exactly these marks in these slots, and zeros everywhere else."""
    for layer, capacity in enumerate((WINDOW, LENGTH)):
        stored = torch.zeros(NUM_SLOTS, capacity, 1, 2)
        for slot, written in expected.items():
            for position, mark in enumerate(written):
                stored[slot, position % capacity] = mark + 1000 * layer
        assert torch.equal(kv.keys[layer], stored)
        assert torch.equal(kv.values[layer], -stored)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Collects the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("swapped_at_once", [1, 3, 4, 100])
def test_edits_of_any_length_allocate_nothing(
    monkeypatch: pytest.MonkeyPatch, swapped_at_once: int
) -> None:
    monkeypatch.setattr(kv_slots, "SWAPPED_AT_ONCE", swapped_at_once)
    kv = slots()
    write(kv, 0, 0, [1, 2, 3, 4, 5, 6, 7])
    write(kv, 2, 0, [11, 12])
    with Operations() as operations:
        kv.apply([SlotSwap(0, 2, 7), SlotCopy(0, 1, 2), SlotWipe(0, 1, 2)])
    assert_holds(kv, {0: [11], 1: [11, 12], 2: [1, 2, 3, 4, 5, 6, 7]})
    assert operations.names == {"copy_", "select", "slice", "zero_"}


def test_the_shape_is_read_from_a_models_configuration() -> None:
    grouped = Qwen2Config(
        num_hidden_layers=3, hidden_size=32, num_attention_heads=4, num_key_value_heads=2
    )
    assert KVShape.of(grouped, torch.bfloat16) == KVShape((None,) * 3, 2, 8, torch.bfloat16)
    own_head_dim = Gemma3TextConfig(
        num_hidden_layers=3, hidden_size=32, head_dim=64, num_key_value_heads=1
    )
    assert KVShape.of(own_head_dim, torch.float32).head_dim == 64
    plain = LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4)
    assert KVShape.of(plain, torch.float32).num_kv_heads == 4


def windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    return KVShape.of(config, torch.float32).windows


def test_only_sliding_layers_have_windows() -> None:
    assert windows(LlamaConfig(num_hidden_layers=2)) == (None, None)
    assert windows(MistralConfig(num_hidden_layers=2, sliding_window=9)) == (9, 9)
    assert windows(MistralConfig(num_hidden_layers=2, sliding_window=None)) == (None, None)
    gemma = Gemma3TextConfig(
        num_hidden_layers=2, sliding_window=9, layer_types=["sliding_attention", "full_attention"]
    )
    assert windows(gemma) == (9, None)
    for slides, expected in ((True, (None, 9, 9)), (False, (None, None, None))):
        qwen = Qwen2Config(
            num_hidden_layers=3, sliding_window=9, max_window_layers=1, use_sliding_window=slides
        )
        assert windows(qwen) == expected


def test_num_bytes_are_those_of_the_tensors() -> None:
    # Qwen2-0.5B in bfloat16: 24 layers of 2 heads of 64.
    assert KVShape((None,) * 24, 2, 64, torch.bfloat16).slot_bytes(10) == 10 * 12288
    kv = slots()
    assert kv.num_bytes == sum(t.numel() * t.element_size() for t in (*kv.keys, *kv.values))
    assert kv.num_bytes == NUM_SLOTS * (WINDOW + LENGTH) * SHAPE.bytes_per_layer_token


def test_a_window_longer_than_a_slot_is_cut_to_the_slot() -> None:
    assert SHAPE.capacities(3) == (3, 3)


@pytest.mark.slow
@given(st.integers(0, 40), st.integers(1, 9), st.data())
def test_ring_slices_name_each_tokens_place_in_order(
    first: int, capacity: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, capacity))
    places = list(range(capacity))
    named = [i for part in ring_slices(first, first + count, capacity) for i in places[part]]
    assert named == [position % capacity for position in range(first, first + count)]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, 3), st.integers(1, 7)),
            st.tuples(st.just("swap"), st.integers(0, 3), st.integers(0, 3)),
            st.tuples(st.just("copy"), st.integers(0, 3), st.integers(0, 3)),
            st.tuples(st.just("wipe"), st.integers(0, 3), st.just(0)),
        ),
        max_size=25,
    )
)
def test_writes_and_edits_keep_every_sequence_and_leave_zeros_elsewhere(
    events: list[tuple[str, int, int]],
) -> None:
    kv, held, mark = slots(), [list[int]() for _ in range(NUM_SLOTS)], 0
    for event, slot, other in events:
        edit: SlotEdit
        if event == "write":
            count = min(other, LENGTH - len(held[slot]))
            marks = [mark := mark + 1 for _ in range(count)]
            write(kv, slot, len(held[slot]), marks)
            held[slot] += marks
        elif event == "swap" and slot != other:
            edit = SlotSwap(slot, other, max(len(held[slot]), len(held[other])))
            kv.apply([edit])
            held[slot], held[other] = held[other], held[slot]
        elif event == "copy" and slot != other:
            wipe = SlotWipe(other, 0, len(held[other]))
            kv.apply([wipe, SlotCopy(slot, other, len(held[slot]))])
            held[other] = list(held[slot])
        elif event == "wipe":
            kv.apply([SlotWipe(slot, 0, len(held[slot]))])
            held[slot] = []
        assert_holds(kv, dict(enumerate(held)))


def test_the_end_of_an_unwrapped_slot_can_be_wiped() -> None:
    kv = slots()
    write(kv, 2, 0, [1, 2, 3, 4])
    kv.apply([SlotWipe(2, 1, 4)])
    assert_holds(kv, {2: [1]})


def test_one_call_writes_tokens_of_many_slots() -> None:
    kv = slots()
    write(kv, 2, 0, [5])
    for layer in range(2):
        where = torch.tensor([2, 0]), torch.tensor([1, 0])
        kv.write_rows(layer, *where, rows(layer, [1, 2]), -rows(layer, [1, 2]))
    assert_holds(kv, {0: [2], 2: [5, 1]})


def test_a_chunk_is_joined_with_the_tokens_that_its_first_query_sees() -> None:
    kv = slots()
    write(kv, 1, 0, [1, 2, 3, 4, 5, 6])
    for layer, seen in enumerate(([4, 5, 6], [1, 2, 3, 4, 5, 6])):
        keys, values = kv.joined(layer, 1, 6, rows(layer, [7, 8]), -rows(layer, [7, 8]))
        assert torch.equal(keys, rows(layer, [*seen, 7, 8]))
        assert torch.equal(values, -keys)


def test_a_wiped_slot_holds_no_nan() -> None:
    kv = slots()
    kv.keys[1][3, 2] = torch.nan
    kv.values[0][3, 3] = torch.inf
    kv.apply([SlotWipe(3, 0, 5)])
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
    # With a window of 4 the next token sees 3 others: those at positions 3, 4 and 5.
    assert kv.keys[0][1, :, 0, 0].tolist() == [5, 6, 0, 4]
    assert not kv.keys[0][0].any()
