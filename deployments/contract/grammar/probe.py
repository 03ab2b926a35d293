"""Test-compiles a grammar in a subprocess; if it costs too much, only that process ends.

llguidance's own limits bound most of what a grammar can cost, but not all: it takes minutes to
compile some JSON schemas of a hundred bytes, and a thread can't be stopped. So a client's grammar
is first compiled here, over a vocabulary of bytes, under the kernel's limits on CPU time and
memory. The replica compiles it again if it passes.

Run as a program, it reads a grammar from stdin and writes what it found to stdout, as JSON.
"""

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from threading import BoundedSemaphore
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from deployments.contract.grammar.limits import parser_limits

MAX_NUM_PROBES = 2
MAX_MEMORY_BYTES = 2**30
NUM_STEPS = 32
"""Bytes of text to follow: some grammars become too large only after their first brackets."""
EXCEEDED = "it takes too long or too much memory to compile (limits.max_schema_compile_s)"
IMPOSSIBLE = "it leads to a point where nothing may follow"
TOKEN_IDS = (
    "it names token ids (<[...]>), which stand for other text in each model; write the text itself"
)

_UNCHECKED_TOKEN_IDS = {
    "no tokenizer - can't validate <[...]>",
    "no tokenizer - can't validate <[^...]>",
}
"""llguidance's warnings about token ids when it checks a grammar without a vocabulary."""

MAX_NUM_FAULT_LINES = 50
MAX_FAULT_LINE_LENGTH = 1_000
MAX_NUM_WARNINGS = 32
MAX_WARNING_LENGTH = 500

_COMPILE = "compile"
_TRANSLATE = "translate"

_probes = BoundedSemaphore(MAX_NUM_PROBES)


@dataclass(frozen=True, slots=True)
class Finding:
    """What test-compiling a grammar has shown.

    Attributes:
        fault: What is wrong with the grammar, in llguidance's words, which may take several lines;
            None if it can be used.
        warnings: What the grammar leaves out of its JSON schemas, in llguidance's words.
    """

    fault: str | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Translation:
    """A grammar in llguidance's dialect of Lark, or why there is none.

    Attributes:
        lark: The grammar; None if there is a fault.
        fault: What is wrong with the original.
    """

    lark: str | None
    fault: str | None = None


@lru_cache(maxsize=256)
def examine(grammar: str, max_seconds: int) -> Finding:
    """Return what test-compiling a grammar shows. Results are cached.

    Args:
        grammar: As llguidance serializes it.
        max_seconds: CPU seconds, including about 0.1 s to start the interpreter.

    Raises:
        CalledProcessError: The probe itself failed.
    """
    found = _run(_COMPILE, grammar, max_seconds)
    if found is None:
        return Finding(EXCEEDED)
    return Finding(found["fault"] or None, tuple(found["warnings"]))


@lru_cache(maxsize=256)
def translate_gbnf(grammar: str, max_seconds: int) -> Translation:
    """Return a grammar of llama.cpp's form, GBNF, in Lark. Results are cached.

    llguidance's translator is written in Python; its time grows with the square of the number of
    rules, so it would hold up the caller's process.

    Args:
        grammar: The rules, beginning with `root ::=`.
        max_seconds: CPU seconds, including about 0.1 s to start the interpreter.

    Raises:
        CalledProcessError: The probe itself failed.
    """
    found = _run(_TRANSLATE, grammar, max_seconds)
    return Translation(None, EXCEEDED) if found is None else Translation(**found)


def _run(job: str, grammar: str, max_seconds: int) -> dict[str, Any] | None:
    """Return the probe's answer; None if the kernel ended it, or it ran out of memory."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with _probes:
        probe = subprocess.run(
            [sys.executable, "-P", "-m", __name__, job, str(max_seconds)],
            input=grammar,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
    if probe.returncode < 0:
        return None
    probe.check_returncode()
    found: dict[str, Any] = json.loads(probe.stdout)
    return found


def main() -> None:
    """Read a grammar and write what was found, under resource limits."""
    job, max_seconds = sys.argv[1], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CPU, (max_seconds, max_seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    work = _compiled if job == _COMPILE else _translated
    json.dump(work(sys.stdin.read()), sys.stdout)


def _compiled(grammar: str) -> dict[str, Any]:
    limits = parser_limits(grammar)
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits)
    for _ in range(NUM_STEPS):
        if matcher.is_stopped():
            break
        allowed = matcher.compute_bitmask()
        byte = next((i for i in range(256) if allowed[i // 8] >> i % 8 & 1 and i != ord(" ")), None)
        if byte is None:
            break
        matcher.consume_token(byte)
    fault = TOKEN_IDS if _names_token_ids(grammar) else _bounded(matcher.get_error())
    warnings = [text[:MAX_WARNING_LENGTH] for text in matcher.get_grammar_warnings()]
    return {
        "fault": IMPOSSIBLE if fault.startswith("NoExtension") else fault,
        "warnings": sorted(set(warnings))[:MAX_NUM_WARNINGS],
    }


def _names_token_ids(grammar: str) -> bool:
    """Return whether rules name tokens by id; llguidance's parser tells ids from quoted text.

    Such an id may be one of the probe's vocabulary, and mean something else in the model's.
    """
    if "<[" not in grammar:
        return False
    limits = parser_limits(grammar)
    _, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    return not _UNCHECKED_TOKEN_IDS.isdisjoint(messages)


def _translated(grammar: str) -> dict[str, Any]:
    try:
        return {"lark": gbnf_to_lark(grammar)}
    except RecursionError:
        return {"lark": None, "fault": "its brackets are nested too deeply"}
    except Exception as error:  # noqa: BLE001 - the translator has no error of its own
        return {"lark": None, "fault": _bounded(str(error))}


def _bounded(fault: str) -> str:
    lines = fault.splitlines()[:MAX_NUM_FAULT_LINES]
    return "\n".join(line[:MAX_FAULT_LINE_LENGTH] for line in lines)


if __name__ == "__main__":
    main()
