import ctypes
import platform
from collections.abc import Iterator
from itertools import pairwise

import pytest

from deployments.compute.cpu.jit import kernel_program
from deployments.compute.cpu.jit.kernel_program import EPOCH, WORDS, KernelProgram, can_run
from deployments.compute.cpu.jit.launch import KernelCall
from deployments.compute.cpu.jit.machine_code import MachineCode
from deployments.compute.cpu.jit.vector_builder import I64, POINTER, VectorBuilder

needs_programs = pytest.mark.skipif(not can_run(), reason="needs torch on libgomp")

NUM_ELEMENTS = 50


@pytest.fixture(scope="module")
def code() -> MachineCode:
    """Return a kernel that writes the input plus one to the output, an element per ticket."""
    v = VectorBuilder("add_one", 1, is_bfloat16=False)
    b = v.builder
    count, *addresses = (v.load(I64, v.argument, 8 * i) for i in (1, 2, 3))
    source, target = (b.inttoptr(address, POINTER) for address in addresses)
    with v.units(v.argument, count) as index:
        at = b.mul(index, I64(8))
        v.store(b.add(v.load(I64, source, at), I64(1)), target, at)
    b.ret_void()
    return MachineCode(str(v.module), optimize=True)


@pytest.fixture(scope="module")
def kernel(code: MachineCode) -> int:
    return code.address_of("add_one")


@needs_programs
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_calls_run_in_order_in_each_run(kernel: int, num_threads: int) -> None:
    """Each call reads the output of the call before it, across several barriers."""
    num_calls = 3 * EPOCH + 7
    rows = [(ctypes.c_int64 * NUM_ELEMENTS)() for _ in range(num_calls + 1)]
    calls = [
        KernelCall(
            kernel,
            (ctypes.c_int64 * 4)(0, NUM_ELEMENTS, ctypes.addressof(one), ctypes.addressof(other)),
        )
        for one, other in pairwise(rows)
    ]
    program = KernelProgram(calls)
    for first in (5, 100, -3):
        rows[0][:] = [first] * NUM_ELEMENTS
        program.run(num_threads)
        assert all(list(row) == [first + i] * NUM_ELEMENTS for i, row in enumerate(rows))


@needs_programs
def test_a_straggler_is_not_waited_for(kernel: int) -> None:
    """If a thread enters a call and never leaves it, the call is re-executed."""
    rows = [(ctypes.c_int64 * NUM_ELEMENTS)() for _ in range(2)]
    arguments = (ctypes.c_int64 * 4)(0, NUM_ELEMENTS, *map(ctypes.addressof, rows))
    program = KernelProgram([KernelCall(kernel, arguments)])
    words = (ctypes.c_int64 * (len(program._fresh) // 8)).from_buffer_copy(program._fresh)
    words[2 + 3] = 1  # a thread has entered ...
    words[2 + WORDS] = 1  # ... and has taken the first ticket
    program._fresh = bytes(words)
    rows[0][:] = [*range(NUM_ELEMENTS)]
    program.run(1)
    assert list(rows[1]) == [n + 1 for n in range(NUM_ELEMENTS)]


@pytest.fixture
def anew() -> Iterator[None]:
    """Ask again whether programs can run, in this test and after it."""
    can_run.cache_clear()
    yield
    can_run.cache_clear()


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    ("barrier", "machine", "reason"),
    [(1, "aarch64", "x86-64 only, and this is aarch64"), (None, "x86_64", "no barrier")],
)
def test_a_machine_without_programs_says_so_once(
    barrier: int | None,
    machine: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kernel_program, "find_barrier", lambda: barrier)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert not any(can_run() for _ in range(3))
    (record,) = [r for r in caplog.records if r.name == kernel_program.__name__]
    assert record.levelname == "WARNING"
    assert "call by call" in record.message
    assert reason in record.message
