"""Runs a sequence of kernel calls as a whole, in a single parallel region.

Launched one by one, each kernel waits for Python before it and for all threads after it. Here the
threads walk through the calls by themselves.

They do not wait long for a straggler, a thread that has lost its core to another process and holds
a part of one call's work. A thread that has waited about one call's time re-executes the call
itself and goes on. Both write the same values to the same places. Buffers are reused only after a
barrier, so a straggler that resumes cannot corrupt them. Barriers are rare: see `EPOCH`.

Source: https://gcc.gnu.org/onlinedocs/libgomp/Implementing-BARRIER-construct.html
"""

import ctypes
import logging
import platform
from collections.abc import Sequence
from functools import cache

from llvmlite import ir

from deployments.compute.cpu.jit.launch import KernelCall
from deployments.compute.cpu.jit.machine_code import MachineCode
from deployments.compute.cpu.jit.openmp import find_barrier, run_parallel
from deployments.compute.cpu.jit.vector_builder import I64, POINTER, Value, VectorBuilder

logger = logging.getLogger(__name__)

NAME = "run_calls"
"""The name of the function that each thread runs."""

EPOCH = 40
"""Calls from one barrier to the next: about four layers. The calls of one epoch may not reuse a
buffer."""

WORDS = 7
"""64-bit words of a call: the addresses of the kernel, of its arguments and of a copy of them for
re-execution; the numbers of threads that entered and left the call; the same two numbers for its
re-execution."""

PATIENCE_CYCLES = 20_000
"""Cycles to wait for stragglers, on top of the time that the call has taken."""


def emit_runner() -> str:
    """Return the LLVM IR of the function that each thread runs.

    A thread that reaches a call after the others finds no work left in it. After a call it waits
    until all threads that entered it have left it. If that takes too long, it re-executes the call
    with the spare arguments; threads that do so share the work, and wait for each other. After each
    epoch all threads meet at the barrier.
    """
    v = VectorBuilder(NAME, lanes=1, is_bfloat16=False)
    b = v.builder
    num_calls = v.load(I64, v.argument, 0)
    barrier = _function(v, v.load(I64, v.argument, 8), ())
    with v.loop(num_calls, 1) as number:
        words_at = v.offset(v.argument, b.add(b.mul(number, I64(8 * WORDS)), I64(16)))
        places = [v.offset(words_at, 8 * word) for word in range(WORDS)]
        kernel = _function(v, v.load(I64, places[0], 0), (POINTER,))
        arguments, spare_arguments = (b.inttoptr(v.load(I64, at, 0), POINTER) for at in places[1:3])
        began = _cycles(v)
        _run_counted(v, kernel, arguments, places[3:5])
        is_epoch = b.icmp_signed("==", b.urem(b.add(number, I64(1)), I64(EPOCH)), I64(0))
        with b.if_else(is_epoch) as (meet, look):
            with meet:
                b.call(barrier, [])
            with look:
                ended = _cycles(v)
                limit = b.add(b.add(ended, b.sub(ended, began)), I64(PATIENCE_CYCLES))
                _emit_wait(v, kernel, spare_arguments, places, limit)
    b.ret_void()
    return str(v.module)


def _emit_wait(
    v: VectorBuilder, kernel: Value, spare_arguments: Value, places: Sequence[Value], limit: Value
) -> None:
    """Emit the wait until a call is complete; after the cycle `limit` the thread re-executes it."""
    b = v.builder
    wait, patience, again, wait_again, done = (
        b.append_basic_block(name) for name in ("wait", "patience", "again", "wait_again", "done")
    )
    b.branch(wait)
    b.position_at_end(wait)
    b.cbranch(_have_all_left(v, places[3:5]), done, patience)
    b.position_at_end(patience)
    _pause(v)
    b.cbranch(b.icmp_unsigned("<", _cycles(v), limit), wait, again)
    b.position_at_end(again)
    _run_counted(v, kernel, spare_arguments, places[5:7])
    b.branch(wait_again)
    b.position_at_end(wait_again)
    _pause(v)
    b.cbranch(_have_all_left(v, places[5:7]), done, wait_again)
    b.position_at_end(done)


def _run_counted(
    v: VectorBuilder, kernel: Value, arguments: Value, counters: Sequence[Value]
) -> None:
    """Emit a call of the kernel, which counts the thread as it enters and as it leaves."""
    entered_at, left_at = counters
    v.builder.atomic_rmw("add", entered_at, I64(1), "seq_cst")
    v.builder.call(kernel, [arguments])
    v.builder.atomic_rmw("add", left_at, I64(1), "seq_cst")


def _have_all_left(v: VectorBuilder, counters: Sequence[Value]) -> Value:
    b = v.builder
    # What has left is read first: a thread that enters in between must not seem to have left.
    left, entered = (b.load_atomic(at, "seq_cst", 8, typ=I64) for at in reversed(counters))
    return b.icmp_signed("==", entered, left)


def _function(v: VectorBuilder, address: Value, kinds: Sequence[ir.Type]) -> Value:
    """Emit the pointer to a function whose arguments have these types."""
    function = v.builder.inttoptr(address, POINTER)
    function.type = ir.FunctionType(ir.VoidType(), kinds).as_pointer()  # which a call needs
    return function


def _cycles(v: VectorBuilder) -> Value:
    return v.call("llvm.readcyclecounter", I64)


def _pause(v: VectorBuilder) -> None:
    v.call("llvm.x86.sse2.pause", ir.VoidType())


class KernelProgram:
    """Kernel calls that run in order."""

    def __init__(self, calls: Sequence[KernelCall]) -> None:
        """Lay out the calls and their arguments in one block of memory.

        Args:
            calls: At least one. Each must be safe to execute twice: none may read what it writes.
        """
        barrier = find_barrier()
        assert barrier is not None
        assert calls, "the loop of the threads has a first call"
        num_words = 2 + sum(WORDS + 2 * len(call.arguments) for call in calls)
        kind = ctypes.c_int64 * num_words
        self._program = kind()
        address = ctypes.addressof(self._program)
        words, arguments = [len(calls), barrier], list[int]()
        for call in calls:
            copies = []
            for _ in range(2):
                copies.append(address + 8 * (2 + WORDS * len(calls) + len(arguments)))
                arguments += call.arguments
            words += [call.kernel, *copies, 0, 0, 0, 0]
        self._fresh = bytes(kind(*words, *arguments))
        self._address = _runner().address_of(NAME)

    def run(self, num_threads: int) -> None:
        """Run all calls on `num_threads` of torch's threads."""
        ctypes.memmove(self._program, self._fresh, len(self._fresh))  # resets tickets and counters
        run_parallel(self._address, self._program, num_threads)


@cache
def can_run() -> bool:
    """Return whether programs run here: on x86-64, with a barrier for torch's threads.

    The result is cached, so the reason is logged once.
    """
    if find_barrier() is None:
        obstacle = "torch's OpenMP library has no barrier that they can call"
    elif platform.machine() != "x86_64":
        obstacle = f"programs are made for x86-64 only, and this is {platform.machine()}"
    else:
        return True
    logger.warning("decode steps run call by call, and slower: %s", obstacle)
    return False


@cache
def _runner() -> MachineCode:
    return MachineCode(emit_runner(), optimize=False)
