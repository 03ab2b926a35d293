from dataclasses import replace

import pytest
import torch

from deployments.compute.cpu.linear import quantized_linear, small_batch_kernel
from deployments.compute.cpu.linear.packed_layout import BLOCK
from deployments.compute.cpu.linear.quantized_linear import (
    Int4Linear,
    Int8Linear,
    QuantizedLinear,
    pack,
    quantization_obstacle,
    quantize,
)
from deployments.compute.cpu.linear.small_batch_kernel import make_quantized_kernel
from deployments.compute.cpu.linear.small_batch_linear import SmallBatchLinear
from deployments.compute.cpu.linear.tiling import (
    AVX2,
    AVX512,
    AVX512_BF16,
    GROUP_ROWS,
    UNPACKED_BYTES,
    Arithmetic,
)
from deployments.plan.processor import features
from tests.compute.cpu.linear.linears import Product

pytestmark = pytest.mark.skipif(
    quantization_obstacle() is not None, reason=str(quantization_obstacle())
)

OUT, IN = 192, 96

Kind = type[QuantizedLinear]


@pytest.fixture(params=[Int8Linear, Int4Linear])
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(weight: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
    """Return the weights that a layer stands for, in float64."""
    integers, scales = quantize(weight.float(), layer.weight_bits, layer._dtype)
    found: torch.Tensor = integers * scales.double().repeat_interleave(32, 1)
    return found


def test_it_computes_its_formula(kind: Kind, dtype: torch.dtype) -> None:
    weight, bias = tensor(OUT, IN).to(dtype), tensor(OUT, seed=2).to(dtype)
    layer, rows = kind(weight, bias), tensor(200, IN, seed=1).to(dtype)
    product, offenders = Product(rows, rounded(weight, layer), bias), []
    for num_rows in (*range(1, 20), GROUP_ROWS, 127, 128, 200):
        found = layer(rows[None, :num_rows])
        if found.shape != (1, num_rows, OUT) or not product.is_close(found):
            offenders.append(num_rows)
    assert offenders == []


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rest", [0, 32, -32])
def test_a_layer_in_parts_gives_the_product(kind: Kind, dtype: torch.dtype, rest: int) -> None:
    kernel = make_quantized_kernel(dtype, kind.weight_bits)
    assert kernel is not None
    inputs = 2 * UNPACKED_BYTES // kernel.arithmetic.strip // kernel.arithmetic.itemsize + rest
    weight, rows = tensor(128, inputs).to(dtype), tensor(331, inputs, seed=1).to(dtype)
    layer = kind(weight, None)
    together = layer(rows)
    assert Product(rows, rounded(weight, layer)).is_close(together)
    offenders = []
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        for num_rows in (1, 9, 70, 127, 128, 331):
            if not torch.equal(layer(rows[:num_rows]), together[:num_rows]):
                offenders.append((num_threads, num_rows))
    assert offenders == []


def test_any_number_of_outputs_is_computed(kind: Kind, dtype: torch.dtype) -> None:
    rows, offenders = tensor(3, IN, seed=1).to(dtype), []
    for outputs in (1, 63, 65, 100, 4096 + 70):
        weight, bias = tensor(outputs, IN).to(dtype), tensor(outputs, seed=2).to(dtype)
        layer = kind(weight, bias)
        if not Product(rows, rounded(weight, layer), bias).is_close(layer(rows)):
            offenders.append(outputs)
    assert offenders == []


def test_no_weight_is_off_by_more_than_half_a_step(kind: Kind) -> None:
    """Only -8 has no counterpart: what would be 8 becomes 7."""
    weight = tensor(OUT, IN)
    weight[3, :32] *= 1e-6
    weight[5, 40] = -1000
    integers, scales = quantize(weight, kind.weight_bits, torch.float32)
    errors = (integers - weight / scales.repeat_interleave(32, 1)).abs()
    lowest, highest = {8: (-127, 127), 4: (-8, 7)}[kind.weight_bits]
    assert (int(integers.amin()), int(integers.amax())) == (lowest, highest)
    is_cut = (integers == highest) & (lowest == -8)
    assert bool((errors <= torch.where(is_cut, 1.0001, 0.5001)).all())


@pytest.mark.parametrize(("layer", "error"), [(Int8Linear, 0.006), (Int4Linear, 0.09)])
def test_it_is_as_near_to_the_float_layer_as_its_bits_allow(layer: Kind, error: float) -> None:
    rows, weight = tensor(64, IN, seed=1), tensor(OUT, IN)
    expected = rows @ weight.T
    difference = (layer(weight, None)(rows) - expected).norm() / expected.norm()
    assert error / 2 < difference < error


def test_rows_of_another_dtype_than_the_kernels_keep_it(kind: Kind) -> None:
    weight, bias, rows = tensor(OUT, IN), tensor(OUT, seed=2), tensor(2, 3, IN, seed=1)
    found = kind(weight.half(), bias.half())(rows.half())
    assert found.dtype is torch.float16
    in_float32 = kind(weight.half().float(), bias.half().float())(rows.half().float())
    assert torch.equal(found, in_float32.half())


def test_a_rows_result_is_the_same_to_the_bit_in_any_batch(kind: Kind, dtype: torch.dtype) -> None:
    layer = kind(tensor(OUT, IN).to(dtype), tensor(OUT, seed=2).to(dtype))
    rows = tensor(300, IN, seed=5).to(dtype)
    alone = torch.cat([layer(row[None, None])[0] for row in rows])
    counts = (1, 2, 17, 300)
    assert [n for n in counts if not torch.equal(layer(rows[None, :n])[0], alone[:n])] == []


def test_a_row_that_is_not_finite_spoils_only_itself(kind: Kind, dtype: torch.dtype) -> None:
    layer = kind(tensor(OUT, IN).to(dtype), None)
    rows = tensor(4, IN, seed=1).to(dtype)
    before = layer(rows)
    rows[1, 3], rows[2, 0] = float("nan"), float("inf")
    after = layer(rows)
    assert not after[1:3].isfinite().any()
    assert torch.equal(after[[0, 3]], before[[0, 3]])


def test_rows_and_weights_of_zeros_give_the_bias(kind: Kind, dtype: torch.dtype) -> None:
    weight, bias = tensor(OUT, IN).to(dtype), tensor(OUT, seed=2).to(dtype)
    rows = tensor(3, IN, seed=1).to(dtype)
    weight[4], rows[1] = 0, 0
    found = kind(weight, bias)(rows)
    assert torch.equal(found[1], bias)
    assert torch.equal(found[:, 4], bias[4].expand(3))


def test_no_rows_give_no_rows(kind: Kind) -> None:
    layer = kind(tensor(OUT, IN), tensor(OUT))
    for shape in ((0,), (1, 0), (0, 3)):
        assert layer(torch.empty(*shape, IN)).shape == (*shape, OUT)


def test_the_weights_given_to_it_are_not_changed(kind: Kind) -> None:
    weight, bias = tensor(OUT, IN), tensor(OUT)
    layer = kind(weight, bias)
    assert torch.equal(weight, tensor(OUT, IN))
    before = layer(tensor(2, IN))
    weight.zero_()
    bias.zero_()
    assert torch.equal(layer(tensor(2, IN)), before)


def test_quantizing_in_parts_changes_nothing(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kind(tensor(OUT, IN), None)
    monkeypatch.setattr(quantized_linear, "WEIGHTS_AT_ONCE", 1)
    parts = kind(tensor(OUT, IN), None)
    assert torch.equal(parts._integers, whole._integers)
    assert torch.equal(parts._scales, whole._scales)


def test_its_size_is_its_bits_and_the_scales(kind: Kind, dtype: torch.dtype) -> None:
    layer = kind(tensor(OUT, IN).to(dtype), None)
    integers, biases = OUT * IN * kind.weight_bits // 8, 4 * OUT
    assert layer.num_bytes == integers + OUT * IN // 32 * layer._dtype.itemsize + biases


def test_inputs_that_make_no_groups_do_not_fit() -> None:
    assert Int4Linear.fits(torch.nn.Linear(96, 5))
    assert not Int4Linear.fits(torch.nn.Linear(80, 5))


def test_rows_of_another_width_are_refused(kind: Kind) -> None:
    with pytest.raises(ValueError, match=r"rows of 64 .* a layer of 96"):
        kind(tensor(OUT, IN), None)(tensor(3, 64))


def test_a_machine_that_lacks_something_is_told_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "find_parallel", lambda: None)
    assert "GOMP_parallel" in str(quantization_obstacle())
    monkeypatch.setattr(quantized_linear, "find_arithmetic", lambda *_, **__: None)
    assert quantization_obstacle() == "this processor has no AVX2"


NEEDED = {"AVX2": "avx2", "AVX512": "avx512f", "AVX512_BF16": "avx512bf16", "VBMI": "avx512vbmi"}


@pytest.mark.parametrize("weight_bits", [4, 8])
@pytest.mark.parametrize(
    ("name", "arithmetic"),
    [
        ("AVX2", AVX2),
        ("AVX512", AVX512),
        ("AVX512_BF16", AVX512_BF16),
        ("VBMI", replace(AVX512_BF16, has_vbmi=True)),
    ],
)
def test_every_kernel_that_runs_here_computes_the_formula(
    name: str, arithmetic: Arithmetic, weight_bits: int
) -> None:
    if not features().get(NEEDED[name]):
        pytest.skip(f"this processor has no {name}")
    arithmetic = replace(arithmetic, weight_bits=weight_bits)
    dtype = torch.bfloat16 if arithmetic.is_bfloat16 else torch.float32
    integers, scales = quantize(tensor(128, 1056), weight_bits, dtype)
    rows, bias = tensor(19, 1056, seed=1).to(dtype), tensor(128, seed=2)
    columns = scales.view(-1, BLOCK, scales.shape[1]).transpose(1, 2).contiguous()
    kernel = small_batch_kernel._compiled(arithmetic)
    layer = SmallBatchLinear(kernel, pack(integers, arithmetic), bias, columns)
    product = Product(rows, integers * scales.double().repeat_interleave(32, 1), bias)
    assert [n for n in (1, 6, 8, 9, 19) if not product.is_close(layer(rows[:n]))] == []
