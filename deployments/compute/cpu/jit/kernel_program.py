"""Calls of kernels that are made as a whole, in a single parallel region.

Called one by one, each kernel waits for Python before it and for all threads behind it. Here the
threads walk through the calls by themselves.

Nor do they wait for a thread that has lost its core to another process. It holds one piece of one
call's work; who has waited for it about as long as the call takes makes that call again, alone, and
goes on. Both write the same values to the same places. So that the late one, when it comes back,
writes into nothing that is something else by now, memory is used again only behind a barrier, of
which there are few: see `EPOCH`.

Source: https://gcc.gnu.org/onlinedocs/libgomp/Implementing-BARRIER-construct.html
"""

import ctypes
import platform
from collections.abc import Sequence
from functools import cache

from deployments.engine.cpu.launch import KernelCall
from deployments.engine.cpu.machine_code import MachineCode
from deployments.engine.cpu.openmp import find_barrier, run_shared

NAME = "run_calls"
"""The function that a thread runs."""

EPOCH = 40
"""Calls from one barrier to the next: about four layers. No memory may be used for two things by
the calls of one epoch."""

WORDS = 7
"""Of a call: the addresses of the kernel, of its arguments and of those for making it again; how
many threads have entered and left it, and the same when it is made again."""

PATIENCE_CYCLES = 20_000
"""Waited for a thread in any case, besides the time that the call has taken."""

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
"""A thread that comes to a call behind the others finds no work left in it."""


class KernelProgram:
    """Calls in their order."""

    def __init__(self, calls: Sequence[KernelCall]) -> None:
        """Write the calls down.

        Args:
            calls: They may be made more than once: none reads what it writes.
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
        """Make all calls, on so many of torch's threads."""
        ctypes.memmove(self._program, self._fresh, len(self._fresh))  # no ticket taken, nobody in
        run_shared(self._address, self._program, num_threads)


def can_run() -> bool:
    """Return whether torch's threads can wait for each other outside of torch, on an x86."""
    return find_barrier() is not None and platform.machine() == "x86_64"


@cache
def _runner() -> MachineCode:
    return MachineCode(RUN_CALLS, optimize=False)
