import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.compute.cpu.jit import vector_builder
from deployments.compute.cpu.jit.machine_code import MachineCode
from deployments.compute.cpu.jit.openmp import CFunction
from deployments.compute.cpu.jit.vector_builder import I64, Value, VectorBuilder

LANES = 8
EPSILON = 2.0**-23
"""The distance from 1 to the next float32."""

Float32Array = npt.NDArray[np.float32]


class OnVectors:
    """Compiles code emitted for one vector, and applies it to vectors one by one."""

    def __init__(
        self, write: Callable[[VectorBuilder, Value], Value], *, is_bfloat16: bool = False
    ) -> None:
        v = VectorBuilder("apply", LANES, is_bfloat16)
        v.store(write(v, v.load_wide(v.argument, 0)), v.argument, 0)
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


def test_every_bfloat16_but_nan_survives_without_avx512_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vector_builder, "has_bfloat16", lambda: False)
    kept = OnVectors(lambda v, x: v.narrow(x), is_bfloat16=True)
    values = all_bfloat16()
    assert torch.equal(kept(values).view(torch.int16), values.view(torch.int16))


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


def test_a_loop_counts_in_steps() -> None:
    v = VectorBuilder("count", 4, is_bfloat16=False)
    with v.loop(I64(10), 4) as index:
        v.store(index, v.argument, v.builder.mul(index, I64(8)))
    v.builder.ret_void()
    code = MachineCode(str(v.module), optimize=True)
    found = torch.full((12,), -1)
    CFunction(code.address_of("count"))(found.data_ptr())
    assert found.tolist() == [0, -1, -1, -1, 4, -1, -1, -1, 8, -1, -1, -1]
