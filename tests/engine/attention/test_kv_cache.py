from typing import Any

import pytest
import torch
from hypothesis import given, settings
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

from deployments.engine.attention import kv_cache
from deployments.engine.attention.kv_cache import KVCache, KVShape, ring_slices
from deployments.engine.attention.step_reads import Starts
from deployments.plan.kv_layout import KVCopy, KVLayout

WINDOW, LENGTH, BLOCK_SIZE = 4, 7, 2
SHAPE = KVShape(windows=(WINDOW, None), num_kv_heads=1, head_dim=2, dtype=torch.float32)
LAYOUT = KVLayout((LENGTH, WINDOW), (16, 10), BLOCK_SIZE)
GROUPS = (1, 0)
"""The group of each layer: the one without a window is the first."""

EXTENTS: tuple[Starts, ...] = ((24, 0), (8, 16), (0, 12), (16, 6))
"""Starts of extents that no others overlap."""


def cache() -> KVCache:
    return KVCache(SHAPE, LAYOUT, max_model_len=LENGTH, device=torch.device("cpu"))


def rows(layer: int, marks: list[int]) -> torch.Tensor:
    """Return keys that encode layer and mark."""
    tensor = torch.tensor(marks, dtype=torch.float32) + 1000 * layer
    return tensor[:, None, None].expand(-1, 1, 2)


def write(kv: KVCache, starts: Starts, start: int, marks: list[int]) -> None:
    for layer in range(2):
        kv.write_chunk(layer, starts, start, rows(layer, marks), -rows(layer, marks))


def assert_holds(kv: KVCache, expected: dict[Starts, list[int]]) -> None:
    """Require exactly these marks in these extents, and zeros everywhere else."""
    for layer, capacity in enumerate((WINDOW, LENGTH)):
        stored = torch.zeros_like(kv.keys[layer])
        for starts, written in expected.items():
            for position, mark in enumerate(written):
                stored[starts[GROUPS[layer]] + position % capacity] = mark + 1000 * layer
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


@pytest.mark.parametrize("moved_at_once", [1, 3, 5, 4096])
@settings(max_examples=60)
@given(
    source=st.integers(0, 20),
    target=st.integers(0, 20),
    num_tokens=st.integers(0, 12),
    group=st.integers(0, 1),
)
def test_copies_that_overlap_in_any_way_allocate_nothing_and_touch_one_group(
    moved_at_once: int, source: int, target: int, num_tokens: int, group: int
) -> None:
    layout = KVLayout((LENGTH, WINDOW), (16, 16), BLOCK_SIZE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kv_cache, "MOVED_AT_ONCE", moved_at_once)
        kv = KVCache(SHAPE, layout, max_model_len=LENGTH, device=torch.device("cpu"))
    tensors = [(GROUPS[layer], t) for layer in range(2) for t in (kv.keys[layer], kv.values[layer])]
    for _, tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    expected = [tensor.clone() for _, tensor in tensors]
    for (own_group, tensor), after in zip(tensors, expected, strict=True):
        if own_group == group:
            after[target : target + num_tokens] = tensor[source : source + num_tokens]
    with Operations() as operations:
        kv.apply([KVCopy(group, source, target, num_tokens)])
    for (_, tensor), after in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, after)
    assert operations.names <= {"copy_", "slice"}


def test_copies_are_made_in_order() -> None:
    kv = cache()
    first, second, third, _ = EXTENTS
    write(kv, first, 0, [1, 2, 3])
    write(kv, second, 0, [11, 12])
    moves = [(second, third), (first, second)]
    kv.apply(
        KVCopy(group, source[group], target[group], 3)
        for source, target in moves
        for group in range(2)
    )
    assert_holds(kv, {first: [1, 2, 3], second: [1, 2, 3], third: [11, 12]})


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


def test_num_bytes_are_those_of_the_blocks() -> None:
    kv = cache()
    num_spare = sum(t[0].numel() * t.element_size() for t in (*kv.keys, *kv.values))
    allocated = sum(t.numel() * t.element_size() for t in (*kv.keys, *kv.values))
    assert kv.num_bytes == allocated - num_spare
    assert kv.num_bytes == (32 + 20) * SHAPE.bytes_per_layer_token


def test_layers_of_equal_capacity_form_a_group() -> None:
    shape = KVShape((9, None, 9, None, 5, None), 2, 64, torch.bfloat16)
    assert shape.group_capacities(100) == (100, 9, 5)
    assert shape.group_token_bytes(100) == (3 * 512, 2 * 512, 512)
    layout = KVLayout((100, 9, 5), (7, 1, 1), 16)
    kv = KVCache(shape, layout, max_model_len=100, device=torch.device("cpu"))
    assert kv.groups == (1, 0, 1, 0, 2, 0)
    assert [kv.group_of(capacity) for capacity in (100, 9, 5)] == [0, 1, 2]
    assert kv.spare_tokens == (112, 16, 16)
    assert [len(keys) for keys in kv.keys] == [17, 113, 17, 113, 17, 113]
    # Qwen2-0.5B in bfloat16: 24 layers of 2 heads of 64.
    assert KVShape((None,) * 24, 2, 64, torch.bfloat16).group_token_bytes(10) == (12288,)


def test_a_window_longer_than_a_sequence_is_cut_to_it() -> None:
    assert SHAPE.capacities(3) == (3, 3)
    assert SHAPE.group_capacities(3) == (3,)
    assert SHAPE.group_token_bytes(3) == (2 * SHAPE.bytes_per_layer_token,)


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
            st.tuples(st.just("move"), st.integers(0, 3), st.integers(0, 3)),
            st.tuples(st.just("shift"), st.integers(0, 3), st.integers(-3, 3)),
            st.tuples(st.just("joined"), st.integers(0, 3), st.integers(1, 3)),
        ),
        max_size=25,
    )
)
def test_sequences_are_kept_wherever_they_are_moved(events: list[tuple[str, int, int]]) -> None:
    kv, mark = cache(), 0
    held: dict[Starts, list[int]] = {starts: [] for starts in EXTENTS}
    for event, which, number in events:
        starts = list(held)[which % len(held)]
        marks = held[starts]
        if event == "write":
            new = [mark := mark + 1 for _ in range(min(number, LENGTH - len(marks)))]
            write(kv, starts, len(marks), new)
            held[starts] = marks + new
        elif event == "joined" and len(marks) + number <= LENGTH:
            for layer, capacity in enumerate((WINDOW, LENGTH)):
                new_rows = rows(layer, [0] * number)
                keys, values = kv.joined(layer, starts, len(marks), new_rows, -new_rows)
                seen = [*marks[max(0, len(marks) - capacity + 1) :], *[0] * number]
                assert torch.equal(keys, rows(layer, seen))
                assert torch.equal(values, -keys)
        elif event in ("move", "shift"):
            free = [extent for extent in EXTENTS if extent != starts and not held.get(extent)]
            target = _shifted(starts, number) if event == "shift" else (free or [starts])[0]
            others = {key: kept for key, kept in held.items() if key != starts and kept}
            if any(_overlap(target, other) for other in others):
                continue
            kv.apply(_moves(starts, target, len(marks)))
            del held[starts]
            held = {**others, target: marks}
        _assert_kept(kv, held)


def _shifted(starts: Starts, by: int) -> Starts:
    spare = (32, 20)
    longest = (8, 4)
    return tuple(
        min(max(0, start + BLOCK_SIZE * by), end - own)
        for start, end, own in zip(starts, spare, longest, strict=True)
    )


def _overlap(one: Starts, other: Starts) -> bool:
    longest = (8, 4)
    return any(abs(a - b) < own for a, b, own in zip(one, other, longest, strict=True))


def _moves(source: Starts, target: Starts, num_tokens: int) -> list[KVCopy]:
    return [
        KVCopy(group, source[group], target[group], min(num_tokens, capacity))
        for group, capacity in enumerate(LAYOUT.capacities)
    ]


def _assert_kept(kv: KVCache, held: dict[Starts, list[int]]) -> None:
    for starts, marks in held.items():
        for layer, capacity in enumerate((WINDOW, LENGTH)):
            for position in range(max(0, len(marks) - capacity), len(marks)):
                place = starts[GROUPS[layer]] + position % capacity
                (expected,) = rows(layer, [marks[position]])
                assert torch.equal(kv.keys[layer][place], expected)
                assert torch.equal(kv.values[layer][place], -expected)


def test_a_chunk_is_stored_and_nothing_else_is_touched() -> None:
    kv = cache()
    starts = EXTENTS[1]
    write(kv, starts, 0, [1, 2, 3])
    write(kv, starts, 3, [4, 5, 6])
    assert_holds(kv, {starts: [1, 2, 3, 4, 5, 6]})


def test_one_call_writes_tokens_anywhere_and_padding_to_the_spare_place() -> None:
    kv = cache()
    for layer, group in enumerate(GROUPS):
        spare = kv.spare_tokens[group]
        assert spare == len(kv.keys[layer]) - 1
        tokens = torch.tensor([5, 0, spare, spare])
        kv.write_tokens(layer, tokens, rows(layer, [1, 2, 9, 9]), -rows(layer, [1, 2, 9, 9]))
        expected = torch.zeros_like(kv.keys[layer])
        expected[tokens] = rows(layer, [1, 2, 9, 9])
        assert torch.equal(kv.keys[layer], expected)
        assert torch.equal(kv.values[layer], -expected)


def test_a_chunk_is_joined_with_the_tokens_that_its_first_query_sees() -> None:
    kv = cache()
    write(kv, EXTENTS[3], 0, [1, 2, 3, 4, 5, 6])
    for layer, seen in enumerate(([4, 5, 6], [1, 2, 3, 4, 5, 6])):
        keys, values = kv.joined(layer, EXTENTS[3], 6, rows(layer, [7, 8]), -rows(layer, [7, 8]))
        assert torch.equal(keys, rows(layer, [*seen, 7, 8]))
        assert torch.equal(values, -keys)


def test_a_stock_cache_is_loaded_and_its_sliding_layers_keep_their_places() -> None:
    config = Gemma3TextConfig(
        num_hidden_layers=2, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    )
    stock = DynamicCache(config=config)
    marks = torch.arange(1.0, 7.0).view(1, 1, 6, 1).expand(-1, -1, -1, 2)
    for layer in range(2):
        stock.update(marks, -marks, layer)
    kv = cache()
    kv.load((8, 16), stock)
    whole = torch.arange(1.0, 7.0)
    assert torch.equal(kv.keys[1][8:14, 0, 0], whole)
    assert torch.equal(kv.values[1][8:14, 0, 0], -whole)
    # With a window of 4 the next token sees 3 others: those at positions 3, 4 and 5.
    assert kv.keys[0][16:, 0, 0].tolist() == [5, 6, 0, 4, 0]
    assert not kv.keys[0][:16].any()
