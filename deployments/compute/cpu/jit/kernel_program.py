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
import platform
from collections.abc import Sequence
from functools import cache

from deployments.compute.cpu.jit.launch import KernelCall
from deployments.compute.cpu.jit.machine_code import MachineCode
from deployments.compute.cpu.jit.openmp import find_barrier, run_parallel

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

RUN_CALLS = f"""
declare i64 @llvm.readcyclecounter()
declare void @llvm.x86.sse2.pause()

define void @{NAME}(ptr %program) {{
entry:
  %num_calls = load i64, ptr %program
  %barrier_at = getelementptr i64, ptr %program, i64 1
  %barrier = load ptr, ptr %barrier_at
  %first = getelementptr i64, ptr %program, i64 2
  br label %next
next:
  %number = phi i64 [0, %entry], [%following, %done]
  %is_left = icmp slt i64 %number, %num_calls
  br i1 %is_left, label %call, label %end
call:
  %offset = mul i64 %number, {WORDS}
  %kernel_at = getelementptr i64, ptr %first, i64 %offset
  %arguments_at = getelementptr i64, ptr %kernel_at, i64 1
  %again_at = getelementptr i64, ptr %kernel_at, i64 2
  %entered_at = getelementptr i64, ptr %kernel_at, i64 3
  %left_at = getelementptr i64, ptr %kernel_at, i64 4
  %entered_again_at = getelementptr i64, ptr %kernel_at, i64 5
  %left_again_at = getelementptr i64, ptr %kernel_at, i64 6
  %kernel = load ptr, ptr %kernel_at
  %arguments = load ptr, ptr %arguments_at
  %began = call i64 @llvm.readcyclecounter()
  %e0 = atomicrmw add ptr %entered_at, i64 1 seq_cst
  call void %kernel(ptr %arguments)
  %l0 = atomicrmw add ptr %left_at, i64 1 seq_cst
  %following = add i64 %number, 1
  %place = urem i64 %following, {EPOCH}
  %is_epoch = icmp eq i64 %place, 0
  br i1 %is_epoch, label %meet, label %look
meet:
  call void %barrier()
  br label %done
look:
  %ended = call i64 @llvm.readcyclecounter()
  %taken = sub i64 %ended, %began
  %limit0 = add i64 %ended, %taken
  %limit = add i64 %limit0, {PATIENCE_CYCLES}
  br label %wait
wait:
  %w_left = load atomic i64, ptr %left_at seq_cst, align 8
  %w_entered = load atomic i64, ptr %entered_at seq_cst, align 8
  %w_all = icmp eq i64 %w_entered, %w_left
  br i1 %w_all, label %done, label %patience
patience:
  call void @llvm.x86.sse2.pause()
  %now = call i64 @llvm.readcyclecounter()
  %goes_on = icmp ult i64 %now, %limit
  br i1 %goes_on, label %wait, label %again
again:
  %again_arguments = load ptr, ptr %again_at
  %e1 = atomicrmw add ptr %entered_again_at, i64 1 seq_cst
  call void %kernel(ptr %again_arguments)
  %l1 = atomicrmw add ptr %left_again_at, i64 1 seq_cst
  br label %wait_again
wait_again:
  call void @llvm.x86.sse2.pause()
  %a_left = load atomic i64, ptr %left_again_at seq_cst, align 8
  %a_entered = load atomic i64, ptr %entered_again_at seq_cst, align 8
  %a_all = icmp eq i64 %a_entered, %a_left
  br i1 %a_all, label %done, label %wait_again
done:
  br label %next
end:
  ret void
}}
"""
"""LLVM IR. A thread that reaches a call after the others finds no work left in it.

After a call a thread waits until all threads that entered it have left it (`wait`). If that takes
too long, it re-executes the call with the spare arguments (`again`); threads that do so share the
work, and wait for each other (`wait_again`). After each epoch all threads meet at the barrier."""


class KernelProgram:
    """Kernel calls that run in order."""

    def __init__(self, calls: Sequence[KernelCall]) -> None:
        """Lay out the calls and their arguments in one block of memory.

        Args:
            calls: Each must be safe to execute twice: no call may read what it writes.
        """
        barrier = find_barrier()
        assert barrier is not None
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


def can_run() -> bool:
    """Return whether programs run here: on x86-64, with a barrier for torch's threads."""
    return find_barrier() is not None and platform.machine() == "x86_64"


@cache
def _runner() -> MachineCode:
    return MachineCode(RUN_CALLS, optimize=False)
