from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.compute.cpu.attention import head_shape, slot_attention
from deployments.compute.cpu.attention.slot_attention import (
    attend_slot_rows,
    can_attend,
)
from deployments.compute.cpu.attention.slot_rows import SlotRows
from deployments.compute.cpu.jit import openmp
from deployments.compute.sdpa import Scores

pytestmark = pytest.mark.slow

NUM_SLOTS, CAPACITY = 5, 40
PLAIN = Scores(None, None)

EDGES = (1, 15, 16, 17, 127, 128, 129, 600)
"""Lengths around the sizes of a vector and a block."""


@dataclass(frozen=True)
class Heads:
    """A kernel's shape; compiling takes a moment, so tests share a few shapes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16


SINGLE, BFLOAT16 = Heads(6, 2, 64, torch.float32), Heads(6, 2, 64)
BOTH = [SINGLE, BFLOAT16]

GROUPS = [*(Heads(group * 2, 2, 16) for group in (1, 2, 7, 14, 15)), Heads(40, 1, 64)]
SIZES = [Heads(6, 2, head_dim) for head_dim in (8, 16, 80, 96, 128, 256)]
SINGLES = [Heads(h.num_heads, h.num_kv_heads, h.head_dim, torch.float32) for h in GROUPS + SIZES]
SHAPES = [*BOTH, *GROUPS, *SIZES, *SINGLES]


@dataclass(frozen=True)
class Row:
    """A row's slot, the number of tokens that it sees, and the index of its own token."""

    slot: int
    length: int
    index: int

    @classmethod
    def at_end(cls, slot: int, length: int) -> "Row":
        return cls(slot, length, length - 1)


class Slots:
    """Random queries, keys and values, determined by a seed."""

    def __init__(
        self,
        heads: Heads,
        rows: list[Row],
        *,
        capacity: int = CAPACITY,
        seed: int = 0,
        spread: float = 1,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).mul(spread).to(heads.dtype)

        num_slots = max(NUM_SLOTS, len(rows))
        stored = num_slots, capacity, heads.num_kv_heads, heads.head_dim
        self.rows = rows
        # Like a layer's output: heads of a joined projection, so rows have gaps between them.
        num_all = heads.num_heads + 2 * heads.num_kv_heads
        joined = normal(1, len(rows), num_all, heads.head_dim).transpose(1, 2)
        sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        self.query, self.key, self.value = joined.split_with_sizes(sizes, dim=1)
        self.keys, self.values = normal(*stored), normal(*stored)

    def attend(self, scores: Scores = PLAIN) -> torch.Tensor:
        places = SlotRows.of(
            *([getattr(row, name) for row in self.rows] for name in ("slot", "index", "length"))
        )
        inputs = self.query, self.key, self.value, self.keys, self.values
        return attend_slot_rows(*inputs, places, scores)[0]

    def expected(self, scores: Scores = PLAIN) -> torch.Tensor:
        """Return attention by its definition, row by row and head by head, in float64."""
        query, keys, values = (t.double() for t in (self.query, *self.stored()))
        _, num_heads, num_rows, head_dim = query.shape
        scale = head_dim**-0.5 if scores.scale is None else scores.scale
        output = torch.empty(num_rows, num_heads, head_dim, dtype=torch.float64)
        for number, row in enumerate(self.rows):
            for head in range(num_heads):
                kv_head = head * keys.shape[2] // num_heads
                products = keys[row.slot, : row.length, kv_head] @ query[0, head, number] * scale
                if scores.softcap is not None:
                    products = scores.softcap * (products / scores.softcap).tanh()
                weights = products.softmax(-1)
                output[number, head] = weights @ values[row.slot, : row.length, kv_head]
        return output

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots' expected keys and values, with the rows' tokens stored."""
        keys, values = self.keys.clone(), self.values.clone()
        for number, row in enumerate(self.rows):
            keys[row.slot, row.index] = self.key[0, :, number]
            values[row.slot, row.index] = self.value[0, :, number]
        return keys, values


def assert_near(found: torch.Tensor, expected: torch.Tensor, spread: float = 1) -> None:
    """Compare with float64, within the precision of the dtype.

    A rounding error of a product changes its weight, so large products give less exact answers.
    """
    tolerance = 1e-5 * max(1, spread**2) if found.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    """Return rows in slots of any order, with their own tokens anywhere, as in a ring buffer."""
    slots = draw(st.permutations(range(NUM_SLOTS)))
    lengths = draw(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=NUM_SLOTS))
    return [
        Row(slot, length, draw(st.integers(0, length - 1)))
        for slot, length in zip(slots, lengths, strict=False)
    ]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[8, 4], ids="{} lanes".format)
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Compile kernels for narrower vectors than this machine's."""
    monkeypatch.setattr(head_shape, "_machine_lanes", lambda: request.param)
    slot_attention._make_kernel.cache_clear()
    yield request.param
    slot_attention._make_kernel.cache_clear()


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_heads_of_every_shape_attend(heads: Heads) -> None:
    slots = Slots(heads, [Row.at_end(3, 37), Row.at_end(0, 1), Row(1, 16, 5)])
    expected = slots.expected()
    found = slots.attend()
    assert found.dtype == heads.dtype
    assert_near(found, expected)


@pytest.mark.parametrize("heads", BOTH, ids=str)
def test_rows_of_every_length_attend(heads: Heads) -> None:
    rows = [Row.at_end(slot, length) for slot, length in enumerate(EDGES)]
    slots = Slots(heads, rows, capacity=max(EDGES))
    expected = slots.expected()
    assert_near(slots.attend(), expected)


@pytest.mark.parametrize("heads", BOTH, ids=str)
@pytest.mark.parametrize(
    "scores", [PLAIN, Scores(0.3, None), Scores(None, 2.0), Scores(0.7, 0.5)], ids=str
)
@settings(max_examples=15)
@given(rows=some_rows(), seed=st.integers(0, 1000), spread=st.sampled_from([0.1, 1.0, 4.0]))
def test_it_is_plain_attention(
    heads: Heads, scores: Scores, rows: list[Row], seed: int, spread: float
) -> None:
    slots = Slots(heads, rows, seed=seed, spread=spread)
    expected = slots.expected(scores)
    assert_near(slots.attend(scores) / spread, expected / spread, spread)


@pytest.mark.parametrize("heads", BOTH, ids=str)
@given(rows=some_rows())
@settings(max_examples=15)
def test_each_row_stores_its_token_and_nothing_else(heads: Heads, rows: list[Row]) -> None:
    slots = Slots(heads, rows)
    inputs = slots.query, slots.key, slots.value
    before, (keys, values) = [tensor.clone() for tensor in inputs], slots.stored()
    slots.attend()
    assert torch.equal(slots.keys, keys)
    assert torch.equal(slots.values, values)
    assert all(map(torch.equal, inputs, before))


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize(
    "heads", [*BOTH, Heads(14, 2, 16), Heads(40, 1, 16, torch.float32)], ids=str
)
@pytest.mark.parametrize("scores", [PLAIN, Scores(0.7, 0.5)], ids=str)
def test_narrower_vectors_give_the_same(heads: Heads, scores: Scores) -> None:
    rows = [Row.at_end(slot, length) for slot, length in enumerate((1, 17, 129))]
    slots = Slots(heads, rows, capacity=130)
    expected = slots.expected(scores)
    assert_near(slots.attend(scores), expected)


def test_a_narrower_vector_gives_another_kernel(lanes: int) -> None:
    kernel = slot_attention._make_kernel(64, 6, 2, torch.bfloat16)
    assert kernel is not None
    assert kernel.shape.lanes == lanes


@pytest.mark.parametrize("heads", BOTH, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_any_number_of_threads_gives_the_same_to_the_last_bit(
    heads: Heads, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads of a single row are divided among the threads."""
    monkeypatch.setattr(slot_attention, "MIN_PARALLEL_PRODUCTS", 0)
    rows = [Row.at_end(slot, 300 - 20 * slot) for slot in range(num_rows)]
    slots = Slots(heads, rows, capacity=300)
    torch.set_num_threads(1)
    expected = slots.attend()
    for num_threads in (2, 5):
        torch.set_num_threads(num_threads)
        assert torch.equal(slots.attend(), expected)


def test_without_a_thread_pool_it_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(BFLOAT16, [Row.at_end(1, 20)])
    expected = slots.attend()
    monkeypatch.setattr(slot_attention, "MIN_PARALLEL_PRODUCTS", 0)
    monkeypatch.setattr(openmp, "find_parallel", lambda: None)
    assert torch.equal(slots.attend(), expected)


@pytest.mark.parametrize("heads", BOTH, ids=str)
def test_a_row_of_one_token_gets_its_value(heads: Heads) -> None:
    slots = Slots(heads, [Row.at_end(3, 1), Row.at_end(0, 1)])
    expected = slots.value[0].repeat_interleave(3, dim=0).transpose(0, 1)
    assert torch.equal(slots.attend(), expected)


@pytest.mark.parametrize("heads", BOTH, ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_very_large_scores_do_not_overflow(heads: Heads, softcap: float | None) -> None:
    scores = Scores(None, softcap)
    slots = Slots(heads, [Row.at_end(1, CAPACITY), Row.at_end(2, 17)], spread=1e4)
    expected = slots.expected(scores)
    found = slots.attend(scores)
    assert found.isfinite().all()
    assert_near(found / 1e4, expected / 1e4)


@pytest.mark.parametrize("heads", BOTH, ids=str)
def test_a_token_far_below_the_largest_score_has_no_weight(heads: Heads) -> None:
    slots = Slots(heads, [Row.at_end(0, CAPACITY)])
    slots.query.zero_()
    slots.query[..., 0] = 1
    slots.key[..., 0] = -200.0
    slots.keys[0, :, :, 0] = -200.0
    slots.keys[0, 5, :, 0] = 0
    found = slots.attend(Scores(1.0, None))
    assert torch.equal(found[0], slots.values[0, 5].repeat_interleave(3, dim=0))


@pytest.mark.parametrize("heads", BOTH, ids=str)
@given(rows=some_rows())
@settings(max_examples=15)
def test_a_rows_result_is_the_same_to_the_last_bit_in_any_batch(
    heads: Heads, rows: list[Row]
) -> None:
    slots = Slots(heads, rows)
    together, given_rows = slots.attend(), (slots.query, slots.key, slots.value)
    for number, row in enumerate(rows):
        own = slice(number, number + 1)
        slots.rows = [row]
        slots.query, slots.key, slots.value = (tensor[:, :, own] for tensor in given_rows)
        assert torch.equal(slots.attend()[0], together[number])


@pytest.mark.parametrize("heads", BOTH, ids=str)
@given(rows=some_rows())
@settings(max_examples=15)
def test_data_past_a_rows_length_changes_nothing(heads: Heads, rows: list[Row]) -> None:
    slots = Slots(heads, rows)
    before = slots.attend()
    lengths = {row.slot: row.length for row in rows}
    for stored in (slots.keys, slots.values):
        for slot in range(NUM_SLOTS):
            stored[slot, lengths.get(slot, 0) :] = torch.nan
    assert torch.equal(slots.attend(), before)


@pytest.mark.parametrize("heads", BOTH, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_non_finite_values_show_in_their_row_and_in_no_other(
    heads: Heads, softcap: float | None
) -> None:
    slots, scores = Slots(heads, [Row.at_end(0, 20), Row.at_end(1, 20)]), Scores(None, softcap)
    before = slots.attend(scores)
    for tensor in (slots.keys, slots.values):
        good = tensor.clone()
        tensor[0, 3] = torch.nan
        after = slots.attend(scores)
        assert after[0].isnan().all()
        assert torch.equal(after[1], before[1])
        tensor[:] = good


def test_heads_of_a_row_need_not_be_adjacent() -> None:
    slots = Slots(SINGLE, [Row.at_end(0, 9), Row.at_end(1, 4), Row.at_end(2, 1)])
    expected = slots.attend()
    slots.query, slots.key, slots.value = (
        tensor.contiguous() for tensor in (slots.query, slots.key, slots.value)
    )
    assert torch.equal(slots.attend(), expected)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_the_kernel_takes_all_these_shapes(heads: Heads) -> None:
    query = torch.zeros(1, heads.num_heads, 3, heads.head_dim, dtype=heads.dtype)
    assert can_attend(query, heads.num_kv_heads)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(7, torch.bfloat16), (9, torch.float32), (4, torch.bfloat16), (2, torch.float32)],
)
def test_the_kernel_does_not_take_heads_that_no_vector_divides(
    head_dim: int, dtype: torch.dtype
) -> None:
    assert not can_attend(torch.zeros(1, 2, 3, head_dim, dtype=dtype), 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_kernel_does_not_take_other_dtypes(dtype: torch.dtype) -> None:
    assert not can_attend(torch.zeros(1, 2, 1, 64, dtype=dtype), 1)


def test_the_kernel_does_not_take_other_devices() -> None:
    assert not can_attend(torch.zeros(1, 2, 1, 64, device="meta"), 1)
