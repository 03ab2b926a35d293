from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.compute.cpu.attention import head_shape, row_attention
from deployments.compute.cpu.attention.row_attention import KVRows, attend_rows, can_attend_rows
from deployments.compute.cpu.attention.row_attention_kernel import RowAttentionKernel
from deployments.compute.cpu.jit import openmp, vector_builder
from deployments.compute.sdpa import Scores

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("threads")]

NUM_EXTENTS, CAPACITY = 5, 40
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
LIKE_OTHERS = [h for h in SINGLES if h.num_heads in (2, 4) or h.head_dim in (96, 128)]
"""Shapes whose groups and vectors are divided like those of other shapes here."""


@dataclass(frozen=True)
class Row:
    """A row's extent, the number of tokens that it sees, and the index of its own token."""

    extent: int
    length: int
    index: int

    @classmethod
    def at_end(cls, extent: int, length: int) -> "Row":
        return cls(extent, length, length - 1)


class Memory:
    """Random queries, keys and values, determined by a seed.

    Extents have a gap of a token after them, and the last extent is the first in memory.
    """

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

        num_extents = max(NUM_EXTENTS, len(rows))
        stored = num_extents * (capacity + 1), heads.num_kv_heads, heads.head_dim
        self.starts = [i * (capacity + 1) for i in range(num_extents)][::-1]
        self.capacity = capacity
        self.rows = rows
        # Like a layer's output: heads of a joined projection, so rows have gaps between them.
        num_all = heads.num_heads + 2 * heads.num_kv_heads
        joined = normal(1, len(rows), num_all, heads.head_dim).transpose(1, 2)
        sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        self.query, self.key, self.value = joined.split_with_sizes(sizes, dim=1)
        self.keys, self.values = normal(*stored), normal(*stored)

    def attend(self, scores: Scores = PLAIN) -> torch.Tensor:
        rows = KVRows.of(
            [self.starts[row.extent] for row in self.rows],
            [row.index for row in self.rows],
            [row.length for row in self.rows],
        )
        inputs = self.query, self.key, self.value, self.keys, self.values
        return attend_rows(*inputs, rows, scores)[0]

    def part(self, row: Row) -> slice:
        """Return the places of the tokens that a row sees."""
        start = self.starts[row.extent]
        return slice(start, start + row.length)

    def expected(self, scores: Scores = PLAIN) -> torch.Tensor:
        """Return attention by its definition, row by row and head by head, in float64."""
        query, keys, values = (t.double() for t in (self.query, *self.stored()))
        _, num_heads, num_rows, head_dim = query.shape
        scale = head_dim**-0.5 if scores.scale is None else scores.scale
        output = torch.empty(num_rows, num_heads, head_dim, dtype=torch.float64)
        for number, row in enumerate(self.rows):
            for head in range(num_heads):
                kv_head = head * keys.shape[1] // num_heads
                products = keys[self.part(row), kv_head] @ query[0, head, number] * scale
                if scores.softcap is not None:
                    products = scores.softcap * (products / scores.softcap).tanh()
                if scores.sinks is not None:
                    products = torch.cat([products, scores.sinks[head, None].double()])
                weights = products.softmax(-1)[: row.length]
                output[number, head] = weights @ values[self.part(row), kv_head]
        return output

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expected keys and values, with the rows' tokens stored."""
        keys, values = self.keys.clone(), self.values.clone()
        for number, row in enumerate(self.rows):
            place = self.starts[row.extent] + row.index
            keys[place] = self.key[0, :, number]
            values[place] = self.value[0, :, number]
        return keys, values


def with_sinks(heads: Heads, level: float = 0.0) -> Scores:
    """Return scores with a sink for each head, all of them different and around a level."""
    return Scores(None, None, torch.linspace(level - 2, level + 2, heads.num_heads))


def assert_near(found: torch.Tensor, expected: torch.Tensor, spread: float = 1) -> None:
    """Compare with float64, within the precision of the dtype.

    A rounding error of a product changes its weight, so large products give less exact answers.
    """
    tolerance = 1e-5 * max(1, spread**2) if found.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    """Return rows in extents of any order, with their own tokens anywhere, as in a ring buffer."""
    extents = draw(st.permutations(range(NUM_EXTENTS)))
    lengths = draw(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=NUM_EXTENTS))
    return [
        Row(extent, length, draw(st.integers(0, length - 1)))
        for extent, length in zip(extents, lengths, strict=False)
    ]


@cache
def kernels_of(machine: str) -> Callable[..., RowAttentionKernel]:
    """Return what makes a machine's kernels; each is compiled once, as on this machine."""
    return cache(row_attention._make_kernel.__wrapped__)


@pytest.fixture(params=[8, 4], ids="{} lanes".format)
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compile kernels for narrower vectors than this machine's."""
    num_lanes: int = request.param
    monkeypatch.setattr(head_shape, "machine_lanes", lambda: num_lanes)
    monkeypatch.setattr(row_attention, "_make_kernel", kernels_of(f"{num_lanes} lanes"))
    return num_lanes


@pytest.fixture
def no_products_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile kernels as on a processor without AVX512_BF16."""
    monkeypatch.setattr(vector_builder, "has_bfloat16", lambda: False)
    monkeypatch.setattr(row_attention, "_make_kernel", kernels_of("no products of pairs"))


@pytest.mark.parametrize(
    "heads",
    [pytest.param(h, marks=pytest.mark.soak if h in LIKE_OTHERS else ()) for h in SHAPES],
    ids=str,
)
def test_heads_of_every_shape_attend(heads: Heads) -> None:
    memory = Memory(heads, [Row.at_end(3, 37), Row.at_end(0, 1), Row(1, 16, 5)])
    expected = memory.expected()
    found = memory.attend()
    assert found.dtype == heads.dtype
    assert_near(found, expected)


@pytest.mark.parametrize("heads", BOTH, ids=str)
def test_rows_of_every_length_attend(heads: Heads) -> None:
    rows = [Row.at_end(extent, length) for extent, length in enumerate(EDGES)]
    memory = Memory(heads, rows, capacity=max(EDGES))
    expected = memory.expected()
    assert_near(memory.attend(), expected)


@pytest.mark.parametrize("heads", BOTH, ids=str)
@pytest.mark.parametrize(
    "scores", [PLAIN, Scores(0.3, None), Scores(None, 2.0), Scores(0.7, 0.5)], ids=str
)
@settings(max_examples=15)
@given(rows=some_rows(), seed=st.integers(0, 1000), spread=st.sampled_from([0.1, 1.0, 4.0]))
def test_it_is_plain_attention(
    heads: Heads, scores: Scores, rows: list[Row], seed: int, spread: float
) -> None:
    memory = Memory(heads, rows, seed=seed, spread=spread)
    expected = memory.expected(scores)
    assert_near(memory.attend(scores) / spread, expected / spread, spread)


@pytest.mark.parametrize("heads", BOTH, ids=str)
@given(rows=some_rows())
@settings(max_examples=15)
def test_each_row_stores_its_token_and_nothing_else(heads: Heads, rows: list[Row]) -> None:
    memory = Memory(heads, rows)
    inputs = memory.query, memory.key, memory.value
    before, (keys, values) = [tensor.clone() for tensor in inputs], memory.stored()
    memory.attend()
    assert torch.equal(memory.keys, keys)
    assert torch.equal(memory.values, values)
    assert all(map(torch.equal, inputs, before))


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize(
    "heads", [*BOTH, Heads(14, 2, 16), Heads(40, 1, 16, torch.float32)], ids=str
)
@pytest.mark.parametrize("scores", [PLAIN, Scores(0.7, 0.5)], ids=str)
def test_narrower_vectors_give_the_same(heads: Heads, scores: Scores) -> None:
    rows = [Row.at_end(extent, length) for extent, length in enumerate((1, 17, 129))]
    memory = Memory(heads, rows, capacity=130)
    expected = memory.expected(scores)
    assert_near(memory.attend(scores), expected)


@pytest.mark.parametrize("heads", [*BOTH, Heads(40, 1, 64), Heads(28, 2, 16)], ids=str)
def test_a_sink_takes_its_part_of_each_heads_weight(heads: Heads) -> None:
    rows = [Row.at_end(extent, length) for extent, length in enumerate(EDGES)]
    for level in (-3.0, 0.0, 3.0):
        memory, scores = Memory(heads, rows, capacity=max(EDGES)), with_sinks(heads, level)
        expected = memory.expected(scores)
        found = memory.attend(scores)
        assert_near(found, expected)
        assert (found.double() - memory.expected()).abs().max() > 0.1


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("heads", BOTH, ids=str)
def test_narrower_vectors_have_the_same_sinks(heads: Heads) -> None:
    memory, scores = Memory(heads, [Row.at_end(0, 1), Row.at_end(2, 37)]), with_sinks(heads)
    expected = memory.expected(scores)
    assert_near(memory.attend(scores), expected)


@pytest.mark.parametrize("heads", BOTH, ids=str)
def test_a_sink_far_above_or_below_all_scores_takes_all_the_weight_or_none(heads: Heads) -> None:
    memory = Memory(heads, [Row.at_end(1, CAPACITY)])
    plain = memory.attend()
    assert torch.equal(memory.attend(with_sinks(heads, -1e4)), plain)
    assert memory.attend(with_sinks(heads, 1e4)).abs().max() < 1e-30


def test_a_narrower_vector_gives_another_kernel(lanes: int) -> None:
    kernel = row_attention._make_kernel(64, 6, 2, torch.bfloat16)
    assert kernel is not None
    assert kernel.shape.lanes == lanes


@pytest.mark.usefixtures("no_products_of_pairs")
@pytest.mark.parametrize("scores", [PLAIN, Scores(0.7, 0.5)], ids=str)
def test_bfloat16_attends_without_products_of_pairs(scores: Scores) -> None:
    rows = [Row.at_end(extent, length) for extent, length in enumerate((1, 17, 129))]
    memory = Memory(BFLOAT16, rows, capacity=130)
    expected = memory.expected(scores)
    assert_near(memory.attend(scores), expected)


@pytest.mark.parametrize("heads", BOTH, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_any_number_of_threads_gives_the_same_to_the_last_bit(
    heads: Heads, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads of a single row are divided among the threads."""
    monkeypatch.setattr(row_attention, "MIN_PARALLEL_PRODUCTS", 0)
    rows = [Row.at_end(extent, 300 - 20 * extent) for extent in range(num_rows)]
    memory = Memory(heads, rows, capacity=300)
    for scores in (PLAIN, with_sinks(heads)):
        torch.set_num_threads(1)
        expected = memory.attend(scores)
        for num_threads in (2, 5):
            torch.set_num_threads(num_threads)
            assert torch.equal(memory.attend(scores), expected)


def test_without_a_thread_pool_it_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(BFLOAT16, [Row.at_end(1, 20)])
    expected = memory.attend()
    monkeypatch.setattr(row_attention, "MIN_PARALLEL_PRODUCTS", 0)
    monkeypatch.setattr(openmp, "find_parallel", lambda: None)
    assert torch.equal(memory.attend(), expected)


@pytest.mark.parametrize("heads", BOTH, ids=str)
def test_a_row_of_one_token_gets_its_value(heads: Heads) -> None:
    memory = Memory(heads, [Row.at_end(3, 1), Row.at_end(0, 1)])
    expected = memory.value[0].repeat_interleave(3, dim=0).transpose(0, 1)
    assert torch.equal(memory.attend(), expected)


@pytest.mark.parametrize("heads", BOTH, ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_very_large_scores_do_not_overflow(heads: Heads, softcap: float | None) -> None:
    scores = Scores(None, softcap)
    memory = Memory(heads, [Row.at_end(1, CAPACITY), Row.at_end(2, 17)], spread=1e4)
    expected = memory.expected(scores)
    found = memory.attend(scores)
    assert found.isfinite().all()
    assert_near(found / 1e4, expected / 1e4)


@pytest.mark.parametrize("heads", BOTH, ids=str)
def test_a_token_far_below_the_largest_score_has_no_weight(heads: Heads) -> None:
    memory = Memory(heads, [Row.at_end(0, CAPACITY)])
    memory.query.zero_()
    memory.query[..., 0] = 1
    memory.key[..., 0] = -200.0
    seen = memory.part(memory.rows[0])
    memory.keys[seen, :, 0] = -200.0
    memory.keys[seen.start + 5, :, 0] = 0
    found = memory.attend(Scores(1.0, None))
    assert torch.equal(found[0], memory.values[seen.start + 5].repeat_interleave(3, dim=0))


@pytest.mark.parametrize("heads", BOTH, ids=str)
@given(rows=some_rows())
@settings(max_examples=15)
def test_a_rows_result_is_the_same_to_the_last_bit_in_any_batch(
    heads: Heads, rows: list[Row]
) -> None:
    memory = Memory(heads, rows)
    together, given_rows = memory.attend(), (memory.query, memory.key, memory.value)
    for number, row in enumerate(rows):
        own = slice(number, number + 1)
        memory.rows = [row]
        memory.query, memory.key, memory.value = (tensor[:, :, own] for tensor in given_rows)
        assert torch.equal(memory.attend()[0], together[number])


@pytest.mark.parametrize("heads", BOTH, ids=str)
@given(rows=some_rows())
@settings(max_examples=15)
def test_data_that_no_row_sees_changes_nothing(heads: Heads, rows: list[Row]) -> None:
    memory = Memory(heads, rows)
    before = memory.attend()
    is_seen = torch.zeros(len(memory.keys), dtype=torch.bool)
    for row in rows:
        is_seen[memory.part(row)] = True
    for stored in (memory.keys, memory.values):
        stored[~is_seen] = torch.nan
    assert torch.equal(memory.attend(), before)


def test_extents_may_be_shorter_than_the_next_ones_and_lie_anywhere() -> None:
    """The same rows give the same to the last bit wherever their extents are."""
    memory = Memory(BFLOAT16, [Row.at_end(0, 30), Row.at_end(1, 7), Row(2, 40, 3)])
    expected = memory.attend()
    keys, values = memory.keys.clone(), memory.values.clone()
    parts = [memory.part(row) for row in memory.rows]
    for tensor, before in ((memory.keys, keys), (memory.values, values)):
        tensor.fill_(torch.nan)
        for part, start in zip(parts, (50, 81, 9), strict=True):
            tensor[start : start + part.stop - part.start] = before[part]
    memory.starts = [50, 81, 9]
    assert torch.equal(memory.attend(), expected)


@pytest.mark.parametrize("heads", BOTH, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_non_finite_values_show_in_their_row_and_in_no_other(
    heads: Heads, softcap: float | None
) -> None:
    memory, scores = Memory(heads, [Row.at_end(0, 20), Row.at_end(1, 20)]), Scores(None, softcap)
    before = memory.attend(scores)
    for tensor in (memory.keys, memory.values):
        good = tensor.clone()
        tensor[memory.starts[0] + 3] = torch.nan
        after = memory.attend(scores)
        assert after[0].isnan().all()
        assert torch.equal(after[1], before[1])
        tensor[:] = good


def test_heads_of_a_row_need_not_be_adjacent() -> None:
    memory = Memory(SINGLE, [Row.at_end(0, 9), Row.at_end(1, 4), Row.at_end(2, 1)])
    expected = memory.attend()
    memory.query, memory.key, memory.value = (
        tensor.contiguous() for tensor in (memory.query, memory.key, memory.value)
    )
    assert torch.equal(memory.attend(), expected)


def test_the_kernel_takes_all_these_shapes() -> None:
    assert [h for h in SHAPES if not can_attend_rows(h.head_dim, h.dtype)] == []


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(7, torch.bfloat16), (9, torch.float32), (4, torch.bfloat16), (2, torch.float32)],
)
def test_the_kernel_does_not_take_heads_that_no_vector_divides(
    head_dim: int, dtype: torch.dtype
) -> None:
    assert not can_attend_rows(head_dim, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_kernel_does_not_take_other_dtypes(dtype: torch.dtype) -> None:
    assert not can_attend_rows(64, dtype)
