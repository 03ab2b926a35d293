import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from deployments.compute.cpu.jit.openmp import find_parallel
from deployments.compute.cpu.linear import small_batch_linear
from deployments.compute.cpu.linear.prepacked_linear import PrepackedLinear, can_prepack
from deployments.compute.cpu.linear.small_batch_kernel import GROUP_ROWS, make_kernel
from deployments.compute.cpu.linear.small_batch_linear import (
    MAX_INPUTS,
    SmallBatchLinear,
    can_read,
    use_small_batch_linear,
)

kernel, parallel = make_kernel(), find_parallel()

pytestmark = pytest.mark.skipif(
    kernel is None or parallel is None or not can_prepack(torch.bfloat16),
    reason="needs a processor with AVX512_BF16, and torch on libgomp",
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layer_of(weight: torch.Tensor, bias: torch.Tensor | None) -> SmallBatchLinear:
    assert kernel is not None
    assert parallel is not None
    packed = PrepackedLinear(weight, bias)._packed
    assert can_read(packed)
    return SmallBatchLinear(packed, bias, kernel)


def assert_close(
    found: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: object
) -> None:
    """Compare with the product in float64, within one rounding of the sum and one of the result."""
    expected = rows.double() @ weight.double().T
    if isinstance(bias, torch.Tensor):
        expected = expected + bias.double()
    scale = rows.double().abs() @ weight.double().abs().T
    assert found.dtype is torch.bfloat16
    assert torch.all((found.double() - expected).abs() <= expected.abs() * 2**-8 + scale * 2**-18)


@pytest.mark.parametrize("num_rows", [*range(1, GROUP_ROWS + 12), 200, 333])
def test_every_number_of_rows_gives_the_product(num_rows: int) -> None:
    weight, bias, rows = random(192, 96), random(192, seed=1), random(1, num_rows, 96, seed=2)
    found = layer_of(weight, bias)(rows)
    assert found.shape == (1, num_rows, 192)
    assert_close(found, rows, weight, bias)


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(32, 64), (64, 4096), (MAX_INPUTS, 128), (896, 896)]
)
@pytest.mark.parametrize("num_rows", [1, 13, 130])
def test_every_size_of_a_layer_gives_the_product(inputs: int, outputs: int, num_rows: int) -> None:
    weight, rows = random(outputs, inputs), random(num_rows, inputs, seed=1)
    assert_close(layer_of(weight, None)(rows), rows, weight, None)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same(num_threads: int) -> None:
    layer, rows = layer_of(random(1024, 64), None), random(20, 64, seed=1)
    before, expected = torch.get_num_threads(), layer(rows)
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(layer(rows), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2, 9])
def test_a_rows_result_does_not_depend_on_its_batch(num_threads: int) -> None:
    layer, rows = layer_of(random(256, 64), random(256, seed=1)), random(420, 64, seed=2)
    alone = torch.cat([layer(row[None]) for row in rows])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_rows in (*range(1, 100, 7), 2 * GROUP_ROWS - 1, 2 * GROUP_ROWS, 331, 420):
            assert torch.equal(layer(rows[:num_rows]), alone[:num_rows])
    finally:
        torch.set_num_threads(before)


def test_nothing_is_written_outside_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rows = layer_of(random(64, 64), None), random(7, 64, seed=1)
    frame = torch.full((3, 7, 64), 7.0).bfloat16()
    monkeypatch.setattr(small_batch_linear, "empty", lambda *_: frame[1])
    assert torch.equal(layer(rows), frame[1])
    assert torch.all(frame[[0, 2]] == 7)


def test_rows_with_gaps_and_no_rows_are_accepted() -> None:
    weight, rows = random(128, 64), random(6, 128, seed=1)
    layer = layer_of(weight, None)
    assert torch.equal(layer(rows[::2, :64]), layer(rows[::2, :64].contiguous()))
    assert layer(rows[:0, :64]).shape == (0, 128)


def test_nan_stays_in_its_row() -> None:
    layer, rows = layer_of(random(128, 64), None), random(5, 64, seed=1)
    expected = layer(rows)
    rows[2, 3] = torch.nan
    found = layer(rows)
    assert torch.all(found[2].isnan())
    assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(100, 64), (128, 72), (128, MAX_INPUTS + 32)], ids=str
)
def test_unsupported_sizes_are_left_alone(outputs: int, inputs: int) -> None:
    assert not can_read(PrepackedLinear(random(outputs, inputs), None)._packed)


def test_other_dtypes_are_left_alone() -> None:
    assert not can_read(PrepackedLinear(random(128, 64).float(), None)._packed)


def test_another_layout_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_batch_linear, "_packs_in_blocks", lambda: False)
    assert not can_read(PrepackedLinear(random(128, 64), None)._packed)


def test_a_traced_graph_gets_the_kernel() -> None:
    module = torch.nn.Sequential(
        PrepackedLinear(random(128, 64), random(128, seed=1)),
        PrepackedLinear(random(100, 128), None),
    )
    rows = random(1, 3, 64, seed=2)
    graph = make_fx(module, tracing_mode="symbolic", _allow_non_fake_inputs=True)(rows)
    expected = graph(rows)
    use_small_batch_linear(graph)
    graph.recompile()
    assert [type(child) for child in graph.children()] == [SmallBatchLinear]
    assert torch.allclose(graph(rows).float(), expected.float(), rtol=0.02, atol=0.1)
