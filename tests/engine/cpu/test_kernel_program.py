import ctypes
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import pytest

from deployments.engine.cpu import float_bits
from deployments.engine.cpu.compilation import compile_worker
from deployments.engine.cpu.kernel_program import EPOCH, WORDS, KernelProgram, can_run
from deployments.engine.cpu.launch import KernelCall

pytestmark = pytest.mark.skipif(not can_run(), reason="needs torch on libgomp")

NUM_PIECES = 50

# Compiled code calls them otherwise than their types say.
carray: Any = numba.carray  # type: ignore[attr-defined]
pointer_to: Any = float_bits.pointer_to
take: Any = float_bits.take


@pytest.fixture(scope="module")
def kernel() -> int:
    """Writes the input plus one to the output, piece by piece."""

    def add_one(arguments: Any) -> None:
        a = carray(pointer_to(arguments), 4, np.int64)
        source = carray(pointer_to(a[2]), a[1], np.int64)
        target = carray(pointer_to(a[3]), a[1], np.int64)
        piece = take(arguments)
        while piece < a[1]:
            target[piece] = source[piece] + 1
            piece = take(arguments)

    return compile_worker(add_one)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_calls_are_made_in_their_order_in_each_run(kernel: int, num_threads: int) -> None:
    """Each reads what the one before has written, over several barriers."""
    num_calls = 3 * EPOCH + 7
    rows = [(ctypes.c_int64 * NUM_PIECES)() for _ in range(num_calls + 1)]
    calls = [
        KernelCall(
            kernel,
            (ctypes.c_int64 * 4)(0, NUM_PIECES, ctypes.addressof(one), ctypes.addressof(other)),
        )
        for one, other in pairwise(rows)
    ]
    program = KernelProgram(calls)
    for first in (5, 100, -3):
        rows[0][:] = [first] * NUM_PIECES
        program.run(num_threads)
        assert all(list(row) == [first + i] * NUM_PIECES for i, row in enumerate(rows))


def test_who_is_late_is_not_waited_for(kernel: int) -> None:
    """A thread that has entered a call and never leaves it: the call is made again."""
    rows = [(ctypes.c_int64 * NUM_PIECES)() for _ in range(2)]
    arguments = (ctypes.c_int64 * 4)(0, NUM_PIECES, *map(ctypes.addressof, rows))
    program = KernelProgram([KernelCall(kernel, arguments)])
    words = (ctypes.c_int64 * (len(program._fresh) // 8)).from_buffer_copy(program._fresh)
    words[2 + 3] = 1  # somebody is in it ...
    words[2 + WORDS] = 1  # ... and has taken the first piece
    program._fresh = bytes(words)
    rows[0][:] = [*range(NUM_PIECES)]
    program.run(1)
    assert list(rows[1]) == [n + 1 for n in range(NUM_PIECES)]
