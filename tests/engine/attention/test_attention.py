from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deployments.compute.attention_arguments import UnsupportedAttentionError
from deployments.engine.attention import packed_step
from deployments.engine.attention.attention import check_heads, check_window, kv_attention
from deployments.engine.attention.kv_cache import KVCache, KVShape
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.attention.step_reads import ChunkRows
from deployments.plan.kv_layout import KVCopy
from tests.engine.attention.extents import make_cache
from tests.engine.fake_varlen import FakeVarlen

LAYER = cast("torch.nn.Module", SimpleNamespace(layer_idx=1, is_causal=True))
MAX_PARTS, LENGTH, HEAD_DIM = 5, 80, 8


@dataclass(frozen=True)
class Part:
    """A sequence in a step: how many of its tokens are stored, and how many are new."""

    num_stored: int
    num_new: int
    is_decode: bool

    @property
    def length(self) -> int:
        return self.num_stored + self.num_new


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
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
            if sinks is not None:
                scores = torch.cat([scores, sinks[head, None]])
            weights = scores.softmax(-1)[: len(seen_keys)]
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
        block_size: int = 8,
    ) -> None:
        torch.manual_seed(seed)
        self.parts = sorted(parts, key=lambda part: not part.is_decode)
        self.window = window
        shape = KVShape((None, window), num_kv_heads, HEAD_DIM, torch.float32)
        lengths = [part.length for part in self.parts]
        self.kv, self.starts = make_cache(
            shape, lengths, max_model_len=LENGTH, block_size=block_size
        )
        self.capacity = self.kv.capacities[1]
        num_rows = sum(part.num_new for part in parts)
        self.query = torch.randn(num_rows, num_kv_heads * group, HEAD_DIM)
        self.key = torch.randn(num_rows, num_kv_heads, HEAD_DIM)
        self.value = torch.randn(num_rows, num_kv_heads, HEAD_DIM)
        self.past = [torch.randn(2, part.num_stored, num_kv_heads, HEAD_DIM) for part in self.parts]
        for index, tensor in enumerate(self.stored):
            for number, past in enumerate(self.past):
                self.store(tensor, number, past[index])

    def store(self, tensor: torch.Tensor, number: int, tokens: torch.Tensor) -> None:
        """Store a whole sequence's tokens one by one."""
        for position, token in enumerate(tokens):
            tensor[self.starts[number][-1] + position % self.capacity] = token

    def step(self) -> PackedStep:
        num_decode = sum(part.is_decode for part in self.parts)
        chunks, row = list[ChunkRows](), num_decode
        for part, starts in zip(self.parts, self.starts, strict=True):
            if not part.is_decode:
                chunks.append(ChunkRows(row, starts, part.num_stored, part.length))
                row += part.num_new
        return PackedStep(
            kv=self.kv,
            decode_starts=tuple(self.starts[:num_decode]),
            decode_positions=tuple(part.num_stored for part in self.parts[:num_decode]),
            chunks=tuple(chunks),
        )

    def whole(self, number: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values of a part's sequence, whose new rows start at `row`."""
        keys, values = self.past[number]
        rows = slice(row, row + self.parts[number].num_new)
        return torch.cat([keys, self.key[rows]]), torch.cat([values, self.value[rows]])

    def expected(
        self, scale: float, softcap: float | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        outputs, row = list[torch.Tensor](), 0
        for number, part in enumerate(self.parts):
            query = self.query[row : row + part.num_new]
            seen = self.whole(number, row)
            outputs.append(reference(query, *seen, scale, self.window, softcap, sinks))
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
        output, scores = kv_attention(LAYER, *self.packed, None, packed_step=step, **arguments)
        assert scores is None
        assert step.visited_layers == {1}
        return output[0]


@contextmanager
def torchs_kernel(kv: KVCache, *, gathers: bool) -> Iterator[None]:
    """Attend by torch, with decode rows gathered for one call or each in a call of its own."""
    cost = float("inf") if gathers else 0.0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kv, "attends_in_place", False)
        patched.setattr(packed_step, "CALL_COST_BYTES", {"cpu": cost})
        yield


@contextmanager
def flash_attention(kv: KVCache) -> Iterator[None]:
    """Attend by length, as on a GPU."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kv, "attends_in_place", False)
        patched.setattr(kv, "reads_by_length", True)
        varlen = FakeVarlen(patched, torch.float32)
        yield
        assert varlen.num_calls > 0


READERS: Mapping[str, Callable[[KVCache], AbstractContextManager[None]]] = {
    "our kernel": lambda kv: nullcontext(),
    "masks, row by row": partial(torchs_kernel, gathers=False),
    "masks, gathered": partial(torchs_kernel, gathers=True),
    "by length": flash_attention,
}


def random_parts(random: Random) -> list[Part]:
    parts = []
    for _ in range(random.randint(1, MAX_PARTS)):
        num_stored = random.choice([0, 1, 3, 17, 60])
        is_decode = random.random() < 0.5
        num_new = 1 if is_decode else random.randint(1, LENGTH - 61)
        parts.append(Part(num_stored, num_new, is_decode))
    return parts


@pytest.mark.slow
@settings(max_examples=120)
@given(
    seed=st.integers(0, 10**6),
    num_kv_heads=st.sampled_from([1, 3]),
    group=st.sampled_from([1, 4]),
    window=st.sampled_from([None, 1, 4, 16, 64]),
    block_size=st.sampled_from([1, 8, 32]),
    scale=st.sampled_from([None, 0.3]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    has_sinks=st.booleans(),
    reader=st.sampled_from(list(READERS)),
)
def test_any_packing_equals_plain_attention(
    seed: int,
    num_kv_heads: int,
    group: int,
    window: int | None,
    block_size: int,
    scale: float | None,
    softcap: float | None,
    has_sinks: bool,
    reader: str,
) -> None:
    assume(reader != "by length" or (softcap is None and not has_sinks))
    packing = Packing(random_parts(Random(seed)), num_kv_heads, group, seed, window, block_size)
    sinks = torch.randn(num_kv_heads * group) if has_sinks else None
    expected = packing.expected(scale or HEAD_DIM**-0.5, softcap, sinks)
    before = [tensor.clone() for tensor in packing.stored]
    with READERS[reader](packing.kv):
        output = packing.attend(scaling=scale, softcap=softcap, s_aux=sinks)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    row = 0
    for number, part in enumerate(packing.parts):
        for kept, whole in zip(before, packing.whole(number, row), strict=True):
            packing.store(kept, number, whole)
        row += part.num_new
    for stored, kept in zip(packing.stored, before, strict=True):
        if reader == "by length":
            stored[-1] = kept[-1]  # the spare token, where such steps store what is not kept
        torch.testing.assert_close(stored, kept, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("window", [None, 4])
def test_the_new_keys_and_values_are_stored_and_nothing_else_is_touched(window: int | None) -> None:
    packing = Packing([Part(5, 1, True), Part(2, 4, False)], 2, 1, 0, window)
    (decoding, chunk), capacity = packing.starts, packing.capacity
    before = [tensor.clone() for tensor in packing.stored]
    packing.attend()
    for stored, old, new in zip(packing.stored, before, (packing.key, packing.value), strict=True):
        old[decoding[-1] + 5 % capacity] = new[0]
        for position, token in enumerate(new[1:], start=2):
            old[chunk[-1] + position % capacity] = token
        torch.testing.assert_close(stored, old, rtol=0, atol=0, equal_nan=True)
    if window is not None:
        assert packing.kv.keys[0].isnan().all()


@pytest.mark.parametrize("gathers", [False, True])
def test_torchs_kernel_reads_a_row_as_a_view_or_gathers_several(gathers: bool) -> None:
    packing = Packing([Part(9, 1, True), Part(3, 1, True), Part(9, 1, True)], 1, 2, 3)
    with torchs_kernel(packing.kv, gathers=gathers):
        spans = packing.step().decode_spans(LENGTH)
    if gathers:
        (span,) = spans
        assert span.rows == slice(0, 3)
        assert isinstance(span.tokens, torch.Tensor)
        (start,) = packing.starts[0]
        assert span.tokens[0].tolist() == [*range(start, start + 9), *[start + 9] * 55]
    else:
        expected = [
            slice(start, start + part.length)
            for (start,), part in zip(packing.starts, packing.parts, strict=True)
        ]
        assert [span.tokens for span in spans] == expected
        assert all(span.mask is None for span in spans)


def test_rows_that_see_all_that_is_gathered_need_no_mask() -> None:
    packing = Packing([Part(9, 1, True), Part(30, 1, True)], 1, 2, 3, window=4)
    with torchs_kernel(packing.kv, gathers=True):
        (span,) = packing.step().decode_spans(4)
    assert isinstance(span.tokens, torch.Tensor)
    assert span.mask is None


@pytest.mark.parametrize("window", [None, 16])
def test_a_sequence_that_was_moved_gives_the_same_to_the_last_bit(window: int | None) -> None:
    parts = [Part(20, 1, True), Part(5, 1, True), Part(17, 9, False)]
    resting, moved = (Packing(parts, 2, 3, 0, window) for _ in range(2))
    expected = resting.attend()
    for number, part in enumerate(moved.parts):
        starts = moved.starts[number]
        copies = [
            KVCopy(group, start, start - 5, min(part.num_stored, capacity))
            for group, (start, capacity) in enumerate(
                zip(starts, moved.kv.layout.capacities, strict=True)
            )
        ]
        moved.kv.apply(copies)  # into the gap before the extent, which overlaps the extent
        moved.starts[number] = tuple(start - 5 for start in starts)
    assert torch.equal(moved.attend(), expected)


@pytest.mark.parametrize(("made_for", "asked"), [(None, 8), (8, None), (8, 16)])
def test_a_window_that_the_cache_was_not_made_for_is_refused(
    made_for: int | None, asked: int | None
) -> None:
    packing = Packing([Part(0, 2, False)], 1, 1, 0, made_for)
    with pytest.raises(UnsupportedAttentionError, match="layer 1 attends to"):
        packing.attend(sliding_window=asked)


def test_an_unknown_argument_is_refused() -> None:
    packing = Packing([Part(0, 2, False)], 1, 1, 0)
    with pytest.raises(UnsupportedAttentionError, match="position_bias"):
        packing.attend(position_bias=torch.zeros(1))


def test_keys_of_other_heads_than_the_caches_are_refused_and_not_stored() -> None:
    packing = Packing([Part(0, 2, False)], 2, 1, 0)
    packing.key = packing.key[:, :1]
    with pytest.raises(UnsupportedAttentionError, match="keys have 1 heads of 8 elements"):
        packing.attend()
    assert packing.stored[0].isnan().all()


def test_a_layer_that_attends_twice_in_one_pass_is_refused() -> None:
    packing = Packing([Part(0, 2, False)], 1, 1, 0)
    step = packing.step()
    kv_attention(LAYER, *packing.packed, None, packed_step=step)
    with pytest.raises(UnsupportedAttentionError, match="layer 1 attends twice"):
        kv_attention(LAYER, *packing.packed, None, packed_step=step)


def test_layers_that_do_not_pass_their_arguments_on_are_refused() -> None:
    packing = Packing([Part(0, 2, False)], 1, 1, 0)
    with pytest.raises(UnsupportedAttentionError, match="do not pass their arguments on"):
        kv_attention(LAYER, *packing.packed, None)


def test_values_of_another_size_than_the_caches_are_refused() -> None:
    shape = KVShape((None, None), 2, 8, torch.float32)
    right, wide = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 16)
    check_heads(shape, right, right)
    with pytest.raises(UnsupportedAttentionError, match="values have 2 heads of 16 elements"):
        check_heads(shape, right, wide)


@pytest.mark.parametrize(
    ("asked", "capacity", "max_model_len"), [(None, 96, 96), (7, 7, 96), (8, 7, 7), (None, 7, 7)]
)
def test_a_window_as_long_as_any_sequence_may_be_left_out(
    asked: int | None, capacity: int, max_model_len: int
) -> None:
    check_window(asked, capacity, max_model_len, 0)


@pytest.mark.parametrize(("asked", "seen"), [(None, 8), (9, 8), (8, 8), (6, 6)])
def test_a_refused_window_is_named_with_its_layer_and_the_configured_one(
    asked: int | None, seen: int
) -> None:
    with pytest.raises(UnsupportedAttentionError, match=rf"layer 1 attends to {seen} .* is 7$"):
        check_window(asked, 7, 8, 1)
