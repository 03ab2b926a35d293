"""Tries a grammar out in a process of its own, so that one which takes too much ends that alone.

llguidance's own limits bound most of what a grammar can cost, but not all: there are JSON schemas
of a hundred bytes that it would compile for minutes, and nothing can end a thread. So what a client
sent is compiled here first, over a vocabulary of bytes, with the kernel watching over seconds and
memory; what passes is compiled again where it is used.

As a program it reads a grammar from stdin and writes to stdout what is wrong with it, if anything.
"""

import os
import resource
import subprocess
import sys
from functools import lru_cache
from threading import BoundedSemaphore

from llguidance import LLMatcher, LLTokenizer

from deployments.engine.grammar_limits import parser_limits

MAX_NUM_PROBES = 2
MAX_MEMORY_BYTES = 2**30
NUM_STEPS = 32
"""How far a text is followed: some grammars are too large only behind their first brackets."""
EXCEEDED = "it takes too long to compile, or too much memory"
IMPOSSIBLE = "it leads to where nothing may follow"

_probes = BoundedSemaphore(MAX_NUM_PROBES)


@lru_cache(maxsize=256)
def find_fault(grammar: str, max_seconds: int) -> str | None:
    """Return what is wrong with a grammar, None if nothing is; the answer is remembered.

    Args:
        grammar: As llguidance serializes it.
        max_seconds: Of CPU, the interpreter's start included, which takes about a tenth.

    Raises:
        CalledProcessError: The program itself is at fault.
    """
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with _probes:
        probe = subprocess.run(
            [sys.executable, "-P", "-m", __name__, str(max_seconds)],
            input=grammar,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
    if probe.returncode < 0:  # ended by a signal: the kernel's, or its own where memory ran out
        return EXCEEDED
    probe.check_returncode()
    return probe.stdout or None


def main() -> None:
    """Read a grammar and write its fault, under limits."""
    max_seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (max_seconds, max_seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    sys.stdout.write(_fault_of(sys.stdin.read()))


def _fault_of(grammar: str) -> str:
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=parser_limits())
    for _ in range(NUM_STEPS):
        if matcher.is_stopped():
            break
        allowed = matcher.compute_bitmask()
        byte = next((i for i in range(256) if allowed[i // 8] >> i % 8 & 1 and i != ord(" ")), None)
        if byte is None:
            break
        matcher.consume_token(byte)
    # One line: behind it may follow the parser's state.
    fault = matcher.get_error().partition("\n")[0]
    return IMPOSSIBLE if fault.startswith("NoExtension") else fault


if __name__ == "__main__":
    main()
