from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engine.cpu.decode_attention import (
    MAX_PRODUCTS,
    MAX_THREADS,
    attend_decode,
    can_attend,
)
from deployments.engine.softcap import Scores

NUM_SLOTS, CAPACITY = 5, 40
PLAIN = Scores(None, None)

ROWS = st.lists(
    st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(1, CAPACITY)), min_size=1, max_size=7
)
"""A slot and a length for each row; the kernel only reads slots, so rows may share one."""


@dataclass(frozen=True)
class Heads:
    """A kernel's shape; each takes a second or two to compile, so tests share them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


GROUPED = Heads(6, 2, 8, torch.float32)
ODD = Heads(3, 3, 7, torch.float32)
BFLOAT16 = Heads(6, 2, 8, torch.bfloat16)
ODD_BFLOAT16 = Heads(4, 1, 5, torch.bfloat16)
ALL_HEADS = [GROUPED, ODD, BFLOAT16, ODD_BFLOAT16]


class Slots:
    """Random queries, keys and values, the same for the same seed."""

    def __init__(self, heads: Heads, num_rows: int, seed: int = 0, spread: float = 1) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).mul(spread).to(heads.dtype)

        stored = NUM_SLOTS, CAPACITY, heads.num_kv_heads, heads.head_dim
        self.query = normal(num_rows, heads.num_heads, heads.head_dim)
        self.keys, self.values = normal(*stored), normal(*stored)

    def attend(self, rows: list[tuple[int, int]], scores: Scores = PLAIN) -> torch.Tensor:
        slots, lengths = zip(*rows, strict=True)
        return attend_decode(self.query, self.keys, self.values, slots, lengths, scores)

    def expected(self, rows: list[tuple[int, int]], scores: Scores = PLAIN) -> torch.Tensor:
        """Attend by the plain definition, row by row and head by head, in float64."""
        query, keys, values = (t.double() for t in (self.query, self.keys, self.values))
        _, num_heads, head_dim = query.shape
        scale = head_dim**-0.5 if scores.scale is None else scores.scale
        output = torch.empty_like(query)
        for row, (slot, length) in enumerate(rows):
            for head in range(num_heads):
                kv_head = head * keys.shape[2] // num_heads
                products = keys[slot, :length, kv_head] @ query[row, head] * scale
                if scores.softcap is not None:
                    products = scores.softcap * (products / scores.softcap).tanh()
                output[row, head] = products.softmax(-1) @ values[slot, :length, kv_head]
        return output


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with float64, as near as the type allows."""
    tolerance = 1e-5 if found.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("heads", ALL_HEADS)
@pytest.mark.parametrize(
    "scores", [PLAIN, Scores(0.3, None), Scores(None, 2.0), Scores(0.7, 0.5)], ids=str
)
@settings(max_examples=15)
@given(rows=ROWS, seed=st.integers(0, 1000), spread=st.sampled_from([0.1, 1.0, 4.0]))
def test_it_is_plain_attention(
    heads: Heads, scores: Scores, rows: list[tuple[int, int]], seed: int, spread: float
) -> None:
    slots = Slots(heads, len(rows), seed, spread)
    found = slots.attend(rows, scores)
    assert found.dtype == heads.dtype
    assert_near(found / spread, slots.expected(rows, scores) / spread)


@pytest.mark.parametrize("heads", ALL_HEADS)
def test_a_row_of_one_token_gets_its_value(heads: Heads) -> None:
    slots = Slots(heads, 2)
    found = slots.attend([(3, 1), (0, 1)])
    values = slots.values[[3, 0], 0].repeat_interleave(heads.num_heads // heads.num_kv_heads, dim=1)
    assert torch.equal(found, values)


@pytest.mark.parametrize("heads", [GROUPED, BFLOAT16])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_very_large_scores_overflow_nothing(heads: Heads, softcap: float | None) -> None:
    slots = Slots(heads, 2, spread=1e4)
    rows, scores = [(1, CAPACITY), (2, 17)], Scores(None, softcap)
    found = slots.attend(rows, scores)
    assert found.isfinite().all()
    assert_near(found / 1e4, slots.expected(rows, scores) / 1e4)


@pytest.mark.parametrize("heads", [GROUPED, BFLOAT16])
def test_a_token_that_stands_far_below_the_largest_weighs_nothing(heads: Heads) -> None:
    slots = Slots(heads, 1)
    slots.query[:] = 0
    slots.query[..., 0] = 1
    slots.keys[0, :, :, 0] = -200.0
    slots.keys[0, 5, :, 0] = 0
    found = slots.attend([(0, CAPACITY)], Scores(1.0, None))
    assert torch.equal(found[0], slots.values[0, 5].repeat_interleave(3, dim=0))


@pytest.mark.parametrize("heads", ALL_HEADS)
@given(rows=ROWS)
@settings(max_examples=15)
def test_a_row_is_the_same_to_the_last_bit_whatever_stands_beside_it(
    heads: Heads, rows: list[tuple[int, int]]
) -> None:
    slots = Slots(heads, len(rows))
    together = slots.attend(rows, Scores(None, 2.0))
    query = slots.query
    for row, place in enumerate(rows):
        slots.query = query[row : row + 1]
        assert torch.equal(slots.attend([place], Scores(None, 2.0))[0], together[row])


@pytest.mark.parametrize("heads", ALL_HEADS)
@given(rows=ROWS)
@settings(max_examples=15)
def test_what_lies_behind_a_rows_length_is_never_read(
    heads: Heads, rows: list[tuple[int, int]]
) -> None:
    slots = Slots(heads, len(rows))
    before = slots.attend(rows)
    for stored in (slots.keys, slots.values):
        for slot in range(NUM_SLOTS):
            seen = max((length for other, length in rows if other == slot), default=0)
            stored[slot, seen:] = torch.nan
    assert torch.equal(slots.attend(rows), before)


@pytest.mark.parametrize("heads", ALL_HEADS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_what_is_not_finite_is_not_hidden_nor_seen_by_other_rows(
    heads: Heads, softcap: float | None
) -> None:
    slots, rows, scores = Slots(heads, 2), [(0, 20), (1, 20)], Scores(None, softcap)
    before = slots.attend(rows, scores)
    for tensor in (slots.keys, slots.values):
        good = tensor.clone()
        tensor[0, 3] = torch.nan
        after = slots.attend(rows, scores)
        assert after[0].isnan().all()
        assert torch.equal(after[1], before[1])
        tensor[:] = good


def test_nothing_but_the_output_is_written() -> None:
    slots = Slots(GROUPED, 2)
    before = [tensor.clone() for tensor in (slots.query, slots.keys, slots.values)]
    slots.attend([(0, 3), (4, CAPACITY)])
    assert all(map(torch.equal, before, (slots.query, slots.keys, slots.values)))


def test_queries_need_not_be_neighbours() -> None:
    slots = Slots(GROUPED, 3)
    rows = [(0, 9), (1, 4), (2, 1)]
    expected = slots.attend(rows)
    # As attention gets them: [num_heads, m, head_dim], transposed.
    slots.query = slots.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not slots.query.is_contiguous()
    assert torch.equal(slots.attend(rows), expected)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("num_threads", "num_products", "can"),
    [
        (1, 100 * MAX_PRODUCTS, True),
        (MAX_THREADS, 100 * MAX_PRODUCTS, True),
        (MAX_THREADS + 1, MAX_PRODUCTS, True),
        (MAX_THREADS + 1, MAX_PRODUCTS + 10, False),
    ],
)
def test_with_more_threads_only_small_calls_are_the_kernels(
    num_threads: int, num_products: int, can: bool
) -> None:
    torch.set_num_threads(num_threads)
    query = torch.zeros(2, 5, 2)
    assert can_attend(query, (7, num_products // 10 - 7)) is can


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types_are_not_the_kernels(dtype: torch.dtype) -> None:
    assert not can_attend(torch.zeros(1, 2, 2, dtype=dtype), (1,))


def test_other_devices_are_not_the_kernels() -> None:
    assert not can_attend(torch.zeros(1, 2, 2, device="meta"), (1,))
