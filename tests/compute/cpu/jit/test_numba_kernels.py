from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.compute.cpu.jit.numba_kernels import as_float32, cast_like

FLOAT32_BITS = st.integers(0, 2**32 - 1)

# Compiled once. numba types an intrinsic as the function that generates it, which takes a context.
jit: Any = numba.njit
widen: Any = as_float32
narrow: Any = cast_like
widened: Any = jit(lambda values: np.array([widen(value) for value in values]))
alike: Any = jit(lambda sample, values: np.array([narrow(sample, value) for value in values]))

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


def floats_of(bits: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(bits, np.uint32).view(np.float32)


def bfloat16_bits(bits: list[int]) -> list[int]:
    """Round float32 values, given as their bits."""
    rounded: list[int] = alike(np.uint16(0), floats_of(bits)).tolist()
    return rounded


def torchs_bits(bits: list[int]) -> list[int]:
    rounded = torch.from_numpy(floats_of(bits)).to(torch.bfloat16)
    return rounded.view(torch.uint16).tolist()


@pytest.mark.parametrize("sign", [0, 1 << 31])
def test_every_kind_of_value_is_rounded_as_torch_does(sign: int) -> None:
    bits = [kind | sign for kind in KINDS]
    assert bfloat16_bits(bits) == torchs_bits(bits)


@given(st.lists(FLOAT32_BITS.filter(lambda bits: bits & 0x7FFFFFFF <= 0x7F800000), min_size=1))
def test_all_values_but_nan_are_rounded_as_torch_does(bits: list[int]) -> None:
    assert bfloat16_bits(bits) == torchs_bits(bits)


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7FC00001])
def test_a_nan_that_arithmetic_produces_stays_nan(bits: int) -> None:
    (rounded,) = bfloat16_bits([bits])
    assert rounded & 0x7FFF > 0x7F80


def test_a_nan_that_arithmetic_never_produces_may_become_a_number() -> None:
    """A known limit of the rounding, which does not check for such bits, to save time."""
    signalling, all_ones = 0x7F800001, 0x7FFFFFFF
    infinity, minus_zero = 0x7F80, 0x8000
    assert bfloat16_bits([signalling, all_ones]) == [infinity, minus_zero]


def test_every_bfloat16_is_read_as_torch_reads_it() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    expected = torch.from_numpy(bits).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(widened(bits), expected)


def test_float32_is_not_changed() -> None:
    values = floats_of([*KINDS, 0x7FC00000])
    np.testing.assert_array_equal(widened(values), values)
    np.testing.assert_array_equal(alike(np.float32(0), values), values)
