import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.compute.cpu.jit.machine_code import MachineCode
from deployments.compute.cpu.jit.openmp import CFunction
from deployments.compute.cpu.jit.vector_builder import I64, Value, VectorBuilder

LANES = 8
EPSILON = 2.0**-23
"""The distance from 1 to the next float32."""

FLOAT32_BITS = st.integers(0, 2**32 - 1)

Float32Array = npt.NDArray[np.float32]


class OnVectors:
    """Compiles code emitted for one vector, and applies it to vectors one by one."""

    def __init__(
        self,
        write: Callable[[VectorBuilder, Value], Value],
        *,
        loads: Callable[[VectorBuilder], Value] = lambda v: v.load_wide(v.argument, 0),
        is_bfloat16: bool = False,
        has_avx512_bf16: bool | None = None,
    ) -> None:
        v = VectorBuilder("apply", LANES, is_bfloat16, has_avx512_bf16=has_avx512_bf16)
        v.store(write(v, loads(v)), v.argument, 0)
        v.builder.ret_void()
        self._code = MachineCode(str(v.module), optimize=True)
        self._function = CFunction(self._code.address_of("apply"))

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        padded = torch.cat([values, values.new_zeros(-len(values) % LANES)]).view(-1, LANES)
        for vector in padded:
            self._function(ctypes.c_void_p(vector.data_ptr()))
        return padded.flatten()[: len(values)]


exponentials = OnVectors(lambda v, x: v.exp(x))
tangents = OnVectors(lambda v, x: v.tanh(x))
kept = OnVectors(lambda v, x: v.narrow(x), is_bfloat16=True)


def all_bfloat16() -> torch.Tensor:
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values[~values.isnan()]


def exp(values: Float32Array) -> Float32Array:
    return exponentials(torch.from_numpy(values.astype(np.float32))).numpy()


def test_exponentials_are_as_exact_as_their_argument_allows() -> None:
    x = np.linspace(-87, 0, 20_001, dtype=np.float32)
    error = np.abs(exp(x) / np.exp(x.astype(np.float64)) - 1)
    # x * log2(e) is rounded to float32, which is an error of up to half a unit in its last place.
    allowed = 2 * EPSILON + np.abs(x) * EPSILON
    assert (error <= allowed).all()


def test_the_exponential_of_zero_is_one() -> None:
    assert exp(np.array([0, -0.0], np.float32)).tolist() == [1, 1]


def test_the_exponential_of_nan_is_nan() -> None:
    assert np.isnan(exp(np.array([np.nan], np.float32))).all()


@pytest.mark.parametrize("x", [-87.4, -88, -104, -200, -3.4e38, -np.inf])
def test_the_exponential_of_a_large_negative_number_is_almost_zero(x: float) -> None:
    (power,) = exp(np.array([x], np.float32))
    assert 0 <= power <= 2.0**-125


@given(st.floats(-87, 0, width=32), st.floats(-87, 0, width=32))
def test_exponentials_do_not_descend(a: float, b: float) -> None:
    low, high = exp(np.array([min(a, b), max(a, b)], np.float32))
    assert low <= high * (1 + 2 * EPSILON)


def test_hyperbolic_tangents_equal_torchs() -> None:
    x = torch.cat([torch.linspace(-12, 12, 2001), torch.tensor([1e4, -1e4, torch.inf, -torch.inf])])
    torch.testing.assert_close(tangents(x), x.tanh(), rtol=1e-6, atol=1e-6)


def test_every_normal_bfloat16_survives_widening_and_narrowing() -> None:
    values = all_bfloat16()
    values = values[(values == 0) | (values.abs() >= torch.finfo(torch.bfloat16).tiny)]
    assert torch.equal(kept(values).view(torch.int16), values.view(torch.int16))


def test_every_bfloat16_but_nan_survives_without_avx512_bf16() -> None:
    kept = OnVectors(lambda v, x: v.narrow(x), is_bfloat16=True, has_avx512_bf16=False)
    values = all_bfloat16()
    assert torch.equal(kept(values).view(torch.int16), values.view(torch.int16))


rounded = OnVectors(
    lambda v, x: v.rounded(x),
    loads=lambda v: v.load(v.floats, v.argument, 0),
    is_bfloat16=True,
    has_avx512_bf16=False,
)
"""Rounds float32 in place, without AVX512_BF16."""

EXACT, NEAREST_UP, NEAREST_DOWN, TIE_TO_EVEN_UP, TIE_TO_EVEN_DOWN = (
    0x3F810000, 0x3F80C000, 0x3F804000, 0x3F818000, 0x3F808000,
)  # fmt: skip
KINDS = (
    EXACT, NEAREST_UP, NEAREST_DOWN, TIE_TO_EVEN_UP, TIE_TO_EVEN_DOWN,
    0x00000000, 0x00000001, 0x00008000, 0x00008001, 0x00018000,  # zero and subnormals
    0x007FFFFF, 0x00800000,  # the largest subnormal, and the least normal
    0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF,  # the last that stays finite, and two that overflow
    0x7F800000,  # infinity
)  # fmt: skip


def rounded_bits(bits: list[int]) -> list[int]:
    """Round float32 values, given as their bits, to bfloat16 without AVX512_BF16."""
    values = torch.from_numpy(np.array(bits, np.uint32).view(np.float32))
    return [int(each) for each in rounded(values).numpy().view(np.uint32)]


def torchs_bits(bits: list[int]) -> list[int]:
    values = torch.from_numpy(np.array(bits, np.uint32).view(np.float32))
    return [int(each) for each in values.bfloat16().float().numpy().view(np.uint32)]


@pytest.mark.parametrize("sign", [0, 1 << 31])
def test_every_kind_of_value_is_rounded_as_torch_does(sign: int) -> None:
    bits = [kind | sign for kind in KINDS]
    assert rounded_bits(bits) == torchs_bits(bits)


@given(st.lists(FLOAT32_BITS.filter(lambda bits: bits & 0x7FFFFFFF <= 0x7F800000), min_size=1))
def test_all_values_but_nan_are_rounded_as_torch_does(bits: list[int]) -> None:
    assert rounded_bits(bits) == torchs_bits(bits)


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7FC00001])
def test_a_nan_that_arithmetic_produces_stays_nan(bits: int) -> None:
    (found,) = rounded_bits([bits])
    assert found & 0x7FFFFFFF > 0x7F800000


def test_a_nan_that_arithmetic_never_produces_may_become_a_number() -> None:
    """A known limit of the rounding, which does not check for such bits, to save time."""
    signalling, all_ones = 0x7F800001, 0x7FFFFFFF
    infinity, minus_zero = 0x7F800000, 0x80000000
    assert rounded_bits([signalling, all_ones]) == [infinity, minus_zero]


def test_sums_are_rounded_to_bfloat16_as_torch_does() -> None:
    doubled = OnVectors(
        lambda v, x: v.narrow(v.builder.fmul(x, v.constant(1.2345))), is_bfloat16=True
    )
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = (values.float() * torch.tensor(1.2345)).bfloat16()
    assert torch.equal(doubled(values), expected)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_a_square_is_transposed(lanes: int) -> None:
    v = VectorBuilder("transpose", lanes, is_bfloat16=False)
    rows = [v.load(v.words, v.argument, 4 * lanes * i) for i in range(lanes)]
    for i, column in enumerate(v.transpose(rows)):
        v.store(column, v.argument, 4 * lanes * i)
    v.builder.ret_void()
    code = MachineCode(str(v.module), optimize=True)
    square = torch.arange(lanes * lanes, dtype=torch.int32).view(lanes, lanes)
    expected = square.T.clone()
    CFunction(code.address_of("transpose"))(square.data_ptr())
    assert torch.equal(square, expected)


@pytest.mark.parametrize(("stop", "indices"), [(3, []), (4, [3]), (12, [3, 7, 11])])
def test_a_span_counts_from_its_start_if_it_has_a_turn(stop: int, indices: list[int]) -> None:
    v = VectorBuilder("count", 4, is_bfloat16=False)
    with v.span(I64(3), I64(stop), 4) as index:
        v.store(index, v.argument, v.builder.mul(index, I64(8)))
    v.builder.ret_void()
    code = MachineCode(str(v.module), optimize=True)
    found = torch.full((12,), -1)
    CFunction(code.address_of("count"))(found.data_ptr())
    assert [i for i, each in enumerate(found.tolist()) if each >= 0] == indices


def test_a_loop_counts_in_steps() -> None:
    v = VectorBuilder("count", 4, is_bfloat16=False)
    with v.loop(I64(10), 4) as index:
        v.store(index, v.argument, v.builder.mul(index, I64(8)))
    v.builder.ret_void()
    code = MachineCode(str(v.module), optimize=True)
    found = torch.full((12,), -1)
    CFunction(code.address_of("count"))(found.data_ptr())
    assert found.tolist() == [0, -1, -1, -1, 4, -1, -1, -1, 8, -1, -1, -1]
