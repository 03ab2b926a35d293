import logging
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.compute.cpu.jit import numba_kernels
from deployments.compute.cpu.jit.numba_kernels import (
    as_float32,
    cast_like,
    compile_kernel,
    is_private,
)

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


def test_a_folder_of_this_user_is_private_unless_others_can_write_or_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "parent" / "cache"
    folder.mkdir(parents=True)
    assert is_private(folder)
    folder.chmod(0o777)
    assert not is_private(folder)
    folder.chmod(0o1777)  # others may add a kernel
    assert not is_private(folder)
    folder.chmod(0o700)
    folder.parent.chmod(0o777)  # others may move it away
    assert not is_private(folder)
    folder.parent.chmod(0o1777)
    assert is_private(folder)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000)
    assert is_private(folder) is (folder.stat().st_uid == 0)


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_kernel_is_not_read_from_a_folder_in_which_others_can_write(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(folder))
    numba_kernels._note_uncached.cache_clear()
    caplog.set_level(logging.INFO, numba_kernels.__name__)

    def nothing(arguments: Any) -> None:
        pass

    # numba makes a folder for each source folder, with the permissions of this process.
    made = numba_kernels._cache_folder(nothing)
    made.chmod(mode)
    assert compile_kernel(nothing)
    assert compile_kernel(nothing)
    is_cached = mode == 0o700
    assert any(made.iterdir()) is is_cached
    messages = [r.message for r in caplog.records if "compiled at each start" in r.message]
    assert len(messages) == (0 if is_cached else 1)
