"""Calls of kernels that are made as a whole, in a single parallel region.

Called one by one, each kernel waits for Python before it and for all threads behind it. Here the
threads walk through the calls by themselves, and wait for each other only.

Source: https://gcc.gnu.org/onlinedocs/libgomp/Implementing-BARRIER-construct.html
"""

import ctypes
from collections.abc import Sequence
from functools import cache

from deployments.engine.cpu.launch import KernelCall
from deployments.engine.cpu.machine_code import MachineCode
from deployments.engine.cpu.openmp import find_barrier, run_shared

NAME = "run_calls"
"""The function that a thread runs."""

WORDS = 3
"""Of a call: the addresses of the kernel, of its arguments and of its ticket."""

RUN_CALLS = f"""
define void @{NAME}(ptr %program) {{
entry:
  %num_calls = load i64, ptr %program
  %barrier_at = getelementptr i64, ptr %program, i64 1
  %barrier = load ptr, ptr %barrier_at
  br label %next
next:
  %number = phi i64 [0, %entry], [%following, %call]
  %is_left = icmp slt i64 %number, %num_calls
  br i1 %is_left, label %call, label %end
call:
  %offset = mul i64 %number, {WORDS}
  %kernel_index = add i64 %offset, 2
  %arguments_index = add i64 %offset, 3
  %ticket_index = add i64 %offset, 4
  %kernel_at = getelementptr i64, ptr %program, i64 %kernel_index
  %arguments_at = getelementptr i64, ptr %program, i64 %arguments_index
  %ticket_at = getelementptr i64, ptr %program, i64 %ticket_index
  %kernel = load ptr, ptr %kernel_at
  %arguments = load ptr, ptr %arguments_at
  %ticket = load ptr, ptr %ticket_at
  call void %kernel(ptr %arguments)
  call void %barrier()
  store atomic i64 0, ptr %ticket monotonic, align 8
  %following = add i64 %number, 1
  br label %next
end:
  ret void
}}
"""
"""A ticket is given back behind the barrier, where nobody draws by it any more."""


class KernelProgram:
    """Calls in their order."""

    def __init__(self, calls: Sequence[KernelCall]) -> None:
        """Write the calls down.

        Args:
            calls: Their arguments are used in place, and may change between two runs.
        """
        barrier = find_barrier()
        assert barrier is not None
        self._calls = tuple(calls)
        words = [len(self._calls), barrier]
        for call in self._calls:
            arguments = ctypes.addressof(call.arguments)
            words += [call.kernel, arguments, arguments + 8 * call.ticket]
        self._program = (ctypes.c_int64 * len(words))(*words)
        self._address = _runner().address_of(NAME)

    def run(self, num_threads: int) -> None:
        """Make all calls, on so many of torch's threads."""
        run_shared(self._address, self._program, num_threads)


def can_run() -> bool:
    """Return whether torch's threads can wait for each other outside of torch."""
    return find_barrier() is not None


@cache
def _runner() -> MachineCode:
    return MachineCode(RUN_CALLS, optimize=False)
