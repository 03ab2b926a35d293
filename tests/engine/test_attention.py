from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engine.attention import (
    INERT_ARGUMENTS,
    UnsupportedAttentionError,
    slot_attention,
)
from deployments.engine.kv_slots import KVShape, KVSlots
from deployments.engine.packed_step import ChunkRows, PackedStep

LAYER = cast("torch.nn.Module", SimpleNamespace(layer_idx=1, is_causal=True))
NUM_SLOTS, LENGTH, HEAD_DIM = 5, 80, 4


@dataclass(frozen=True)
class Part:
    """A sequence in a step: what its slot holds already, and how many tokens come."""

    slot: int
    num_stored: int
    num_new: int
    is_decode: bool


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend by the plain definition, query by query and head by head.

    The queries [m, num_heads, head_dim] are the last of keys and values [n, num_kv_heads, ...].
    """
    output = torch.empty_like(query)
    group = query.shape[1] // keys.shape[1]
    for row in range(len(query)):
        last = len(keys) - len(query) + row
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(query.shape[1]):
            seen_keys = keys[first : last + 1, head // group]
            weights = (seen_keys @ query[row, head] * scale).softmax(-1)
            output[row, head] = weights @ values[first : last + 1, head // group]
    return output


class Packing:
    """Random tensors for some parts, packed as the model runner packs them."""

    def __init__(
        self,
        parts: list[Part],
        num_kv_heads: int,
        group: int,
        seed: int,
        window: int | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.parts = sorted(parts, key=lambda part: (not part.is_decode, part.slot))
        self.window = window
        shape = KVShape((None, window), num_kv_heads, HEAD_DIM, torch.float32)
        self.kv = KVSlots(
            shape, num_slots=NUM_SLOTS, max_model_len=LENGTH, device=torch.device("cpu")
        )
        self.capacity = self.kv.capacities[1]
        num_rows = sum(part.num_new for part in parts)
        self.query = torch.randn(num_rows, num_kv_heads * group, HEAD_DIM)
        self.key = torch.randn(num_rows, num_kv_heads, HEAD_DIM)
        self.value = torch.randn(num_rows, num_kv_heads, HEAD_DIM)
        self.past = {
            part.slot: torch.randn(2, part.num_stored, num_kv_heads, HEAD_DIM) for part in parts
        }
        for index, tensor in enumerate(self.stored):
            # What other sequences left behind must change nothing.
            tensor.copy_(torch.randn(tensor.shape) * 10)
            for slot, past in self.past.items():
                self.store(tensor, slot, past[index])

    def store(self, tensor: torch.Tensor, slot: int, tokens: torch.Tensor) -> None:
        """Store a whole sequence's tokens one by one."""
        for position, token in enumerate(tokens):
            tensor[slot, position % self.capacity] = token

    def step(self) -> PackedStep:
        decode = [part for part in self.parts if part.is_decode]
        chunks, row = list[ChunkRows](), len(decode)
        for part in self.parts[len(decode) :]:
            end = part.num_stored + part.num_new
            chunks.append(ChunkRows(row, part.slot, part.num_stored, end))
            row += part.num_new
        return PackedStep(
            kv=self.kv,
            decode_slots=tuple(part.slot for part in decode),
            decode_positions=tuple(part.num_stored for part in decode),
            chunks=tuple(chunks),
        )

    def whole(self, part: Part, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values of a part's sequence, whose new rows start at `row`."""
        keys, values = self.past[part.slot]
        rows = slice(row, row + part.num_new)
        return torch.cat([keys, self.key[rows]]), torch.cat([values, self.value[rows]])

    def expected(self, scale: float) -> torch.Tensor:
        outputs, row = list[torch.Tensor](), 0
        for part in self.parts:
            query = self.query[row : row + part.num_new]
            outputs.append(reference(query, *self.whole(part, row), scale, self.window))
            row += part.num_new
        return torch.cat(outputs)

    @property
    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv.keys[1], self.kv.values[1]

    @property
    def packed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value: [1, heads, n, head_dim]."""
        query, key, value = (t.transpose(0, 1)[None] for t in (self.query, self.key, self.value))
        return query, key, value

    def attend(self, **arguments: Any) -> torch.Tensor:
        step = self.step()
        arguments = {"sliding_window": self.window, **arguments}
        output, scores = slot_attention(LAYER, *self.packed, None, packed_step=step, **arguments)
        assert scores is None
        assert step.visited_layers == {1}
        return output[0]


def random_parts(random: Random) -> list[Part]:
    parts = []
    for slot in random.sample(range(NUM_SLOTS), random.randint(1, NUM_SLOTS)):
        num_stored = random.choice([0, 1, 3, 17, 60])
        is_decode = random.random() < 0.5
        num_new = 1 if is_decode else random.randint(1, LENGTH - 61)
        parts.append(Part(slot, num_stored, num_new, is_decode))
    return parts


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    window=st.sampled_from([None, 1, 4, 16, 64]),
    scale=st.sampled_from([None, 0.3]),
)
def test_any_packing_equals_plain_attention(
    seed: int, num_kv_heads: int, group: int, window: int | None, scale: float | None
) -> None:
    packing = Packing(random_parts(Random(seed)), num_kv_heads, group, seed, window)
    expected = packing.expected(scale or HEAD_DIM**-0.5)
    output = packing.attend(scaling=scale)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    row = 0
    for part in packing.parts:
        for stored, whole in zip(packing.stored, packing.whole(part, row), strict=True):
            kept = stored.clone()
            packing.store(kept, part.slot, whole)
            assert torch.equal(stored, kept)
        row += part.num_new


@pytest.mark.parametrize("window", [None, 4])
def test_the_new_keys_and_values_are_stored_and_nothing_else_is_touched(window: int | None) -> None:
    packing = Packing([Part(0, 5, 1, True), Part(3, 2, 4, False)], 2, 1, 0, window)
    before = [tensor.clone() for tensor in packing.stored]
    packing.attend()
    for stored, old, new in zip(packing.stored, before, (packing.key, packing.value), strict=True):
        capacity = packing.capacity
        old[0, 5 % capacity] = new[0]
        for position, token in enumerate(new[1:], start=2):
            old[3, position % capacity] = token
        assert torch.equal(stored, old)
    assert not packing.kv.keys[0].any()


def test_decode_rows_in_slots_with_gaps_read_their_own() -> None:
    packing = Packing([Part(1, 9, 1, True), Part(4, 3, 1, True)], 1, 2, 3)
    expected = packing.expected(HEAD_DIM**-0.5)
    torch.testing.assert_close(packing.attend(), expected)


@pytest.mark.parametrize(("made_for", "asked"), [(None, 8), (8, None), (8, 16)])
def test_a_window_that_the_slots_were_not_made_for_is_refused(
    made_for: int | None, asked: int | None
) -> None:
    packing = Packing([Part(0, 0, 2, False)], 1, 1, 0, made_for)
    with pytest.raises(UnsupportedAttentionError, match=f"layer 1 .* sliding_window of {asked}"):
        packing.attend(sliding_window=asked)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "something_new"])
def test_an_argument_that_is_not_known_is_refused_by_name(name: str) -> None:
    packing = Packing([Part(0, 0, 2, False)], 1, 1, 0)
    with pytest.raises(UnsupportedAttentionError, match=name):
        packing.attend(**{name: 30.0})
    packing.attend(**{name: None})


def test_arguments_that_change_nothing_are_let_through() -> None:
    packing = Packing([Part(0, 0, 2, False)], 1, 1, 0)
    expected = packing.attend()
    assert torch.equal(packing.attend(**dict.fromkeys(INERT_ARGUMENTS, 0)), expected)


def test_a_mask_of_the_models_own_is_refused() -> None:
    packing = Packing([Part(0, 0, 2, False)], 1, 1, 0)
    with pytest.raises(UnsupportedAttentionError, match="mask"):
        slot_attention(LAYER, *packing.packed, torch.ones(1), packed_step=packing.step())


def test_a_layer_that_looks_ahead_is_refused() -> None:
    packing = Packing([Part(0, 0, 2, False)], 1, 1, 0)
    layer = cast("torch.nn.Module", SimpleNamespace(layer_idx=1, is_causal=False))
    with pytest.raises(UnsupportedAttentionError, match="look ahead"):
        slot_attention(layer, *packing.packed, None, packed_step=packing.step())
