from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.compute.attention_arguments import UnsupportedAttentionError
from deployments.engine.attention.attention import check_heads, check_window, slot_attention
from deployments.engine.attention.kv_slots import KVShape, KVSlots
from deployments.engine.attention.packed_step import ChunkRows, PackedStep

LAYER = cast("torch.nn.Module", SimpleNamespace(layer_idx=1, is_causal=True))
NUM_SLOTS, LENGTH, HEAD_DIM = 5, 80, 4


@dataclass(frozen=True)
class Part:
    """A sequence in a step: how many tokens its slot holds, and how many are new."""

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
    softcap: float | None,
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
            scores = seen_keys @ query[row, head] * scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            output[row, head] = scores.softmax(-1) @ values[first : last + 1, head // group]
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
            # Data that other sequences left behind must not matter.
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

    def expected(self, scale: float, softcap: float | None = None) -> torch.Tensor:
        outputs, row = list[torch.Tensor](), 0
        for part in self.parts:
            query = self.query[row : row + part.num_new]
            outputs.append(reference(query, *self.whole(part, row), scale, self.window, softcap))
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


@pytest.mark.slow
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    num_kv_heads=st.sampled_from([1, 3]),
    group=st.sampled_from([1, 4]),
    window=st.sampled_from([None, 1, 4, 16, 64]),
    scale=st.sampled_from([None, 0.3]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
)
def test_any_packing_equals_plain_attention(
    seed: int,
    num_kv_heads: int,
    group: int,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> None:
    packing = Packing(random_parts(Random(seed)), num_kv_heads, group, seed, window)
    expected = packing.expected(scale or HEAD_DIM**-0.5, softcap)
    output = packing.attend(scaling=scale, softcap=softcap)
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
    with pytest.raises(UnsupportedAttentionError, match="layer 1 attends to"):
        packing.attend(sliding_window=asked)


def test_an_unknown_argument_is_refused() -> None:
    packing = Packing([Part(0, 0, 2, False)], 1, 1, 0)
    with pytest.raises(UnsupportedAttentionError, match="s_aux"):
        packing.attend(s_aux=torch.zeros(1))


def test_keys_of_other_heads_than_the_slots_are_refused_and_not_stored() -> None:
    packing = Packing([Part(0, 0, 2, False)], 2, 1, 0)
    before = packing.stored[0].clone()
    packing.key = packing.key[:, :1]
    with pytest.raises(UnsupportedAttentionError, match="keys have 1 heads of 4 elements"):
        packing.attend()
    assert torch.equal(packing.stored[0], before)


def test_a_layer_that_attends_twice_in_one_pass_is_refused() -> None:
    packing = Packing([Part(0, 0, 2, False)], 1, 1, 0)
    step = packing.step()
    slot_attention(LAYER, *packing.packed, None, packed_step=step)
    with pytest.raises(UnsupportedAttentionError, match="layer 1 attends twice"):
        slot_attention(LAYER, *packing.packed, None, packed_step=step)


def test_layers_that_do_not_pass_their_arguments_on_are_refused() -> None:
    packing = Packing([Part(0, 0, 2, False)], 1, 1, 0)
    with pytest.raises(UnsupportedAttentionError, match="do not pass their arguments on"):
        slot_attention(LAYER, *packing.packed, None)


def test_values_of_another_size_than_the_slots_are_refused() -> None:
    shape = KVShape((None, None), 2, 8, torch.float32)
    right, wide = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 16)
    check_heads(shape, right, right)
    with pytest.raises(UnsupportedAttentionError, match="values have 2 heads of 16 elements"):
        check_heads(shape, right, wide)


@pytest.mark.parametrize(
    ("asked", "capacity", "max_model_len"), [(None, 96, 96), (7, 7, 96), (8, 7, 7), (None, 7, 7)]
)
def test_a_window_as_long_as_a_slot_may_be_left_out(
    asked: int | None, capacity: int, max_model_len: int
) -> None:
    check_window(asked, capacity, max_model_len, 0)


@pytest.mark.parametrize(("asked", "seen"), [(None, 8), (9, 8), (8, 8), (6, 6)])
def test_a_refused_window_is_named_with_its_layer_and_the_configured_one(
    asked: int | None, seen: int
) -> None:
    with pytest.raises(UnsupportedAttentionError, match=rf"layer 1 attends to {seen} .* is 7$"):
        check_window(asked, 7, 8, 1)
