"""Writes grammars for the engine, and test-compiles them before a replica sees them.

A grammar consists of rules in llguidance's dialect of Lark, and of named parts that the rules refer
to as `@name`: JSON schemas, or rules of a client. The rules are ours; a client's own rules are
always a part, so that they can't change the options set here.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from deployments.contract.bounded_executor import BoundedExecutor
from deployments.contract.errors import InvalidRequestError
from deployments.contract.grammar.probe import MAX_NUM_PROBES, examine
from serve_app.api.structured.fault_text import readable
from serve_app.config import LimitsConfig

MAX_NUM_SCHEMAS: Final = 256
"""Most requests whose grammars are compiled or queued in one ingress; each may take a second."""

# For each mask, llguidance would follow a text's forced continuation to its end: that doubles the
# cost of a mask, and for `(a{1000}){1000}` it takes a second.
_OPTIONS: Final = '%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True, slots=True)
class GrammarSettings:
    """The operator's settings for grammars.

    Attributes:
        limits: The bounds on a grammar's source: its size, depth and compile time.
        closes_objects: Whether objects that list `properties` have no others; see `closed_schema`.
    """

    limits: LimitsConfig
    closes_objects: bool = True


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """A grammar that can be used.

    Attributes:
        text: The grammar, for `SamplingParams`.
        unheld: What it leaves out of the client's schemas, in words; answers may violate it.
    """

    text: str
    unheld: tuple[str, ...] = ()


Part = Mapping[str, Any]
"""A part of a grammar: its `name`, and its `json_schema` or `lark_grammar`."""


def schema_executor() -> BoundedExecutor:
    """Return an executor for calls that compile grammars.

    It has its own threads: on the event loop's threads, queued schemas would hold up images.
    """
    threads = ThreadPoolExecutor(MAX_NUM_PROBES, thread_name_prefix="schema")
    return BoundedExecutor(threads, MAX_NUM_PROBES, MAX_NUM_SCHEMAS, "JSON schemas and grammars")


def serialized(rules: str, parts: Sequence[Part]) -> str:
    """Return a grammar as llguidance reads it.

    Args:
        rules: Rules in Lark, beginning with `start`.
        parts: What the rules refer to.
    """
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": _OPTIONS + rules}, *parts]})


def parts_of(grammar: str, name: str) -> list[Part]:
    """Return a serialized grammar as parts of a larger one; `name` becomes that of its rules."""
    answer, *parts = json.loads(grammar)["grammars"]
    return [{**answer, "name": name}, *parts]


def checked(
    grammar: str, settings: GrammarSettings, what: str, param: str, advice: str = ""
) -> AnswerGrammar:
    """Return a grammar after test-compiling it, which may take `limits.max_schema_compile_s`.

    Args:
        grammar: As `serialized` writes it.
        settings: Limit the compile time.
        what: What the client calls it, for an error's message.
        param: The request's field that holds it.
        advice: How a fault may be mended, as a sentence.

    Raises:
        InvalidRequestError: The grammar can't be used.
    """
    found = examine(grammar, settings.limits.max_schema_compile_s)
    if found.fault is not None:
        raise refusal(readable(found.fault), what, param, advice)
    return AnswerGrammar(grammar, found.warnings)


def check_size(text: str, settings: GrammarSettings, what: str, param: str) -> None:
    """Refuse a source that is too large.

    Raises:
        InvalidRequestError: It is larger than `max_schema_bytes`.
    """
    most = settings.limits.max_schema_bytes
    if len(text.encode()) > most:
        raise refusal(f"it is larger than {most} bytes (limits.max_schema_bytes)", what, param)


def check_depth(source: object, settings: GrammarSettings, what: str, param: str) -> None:
    """Refuse a source that is nested too deeply.

    Raises:
        InvalidRequestError: It is nested deeper than `max_schema_depth`.
    """
    most = settings.limits.max_schema_depth
    level = [source]
    for _ in range(most):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise refusal(f"it is nested deeper than {most} levels (limits.max_schema_depth)", what, param)


def _children(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []


def refusal(why: str, what: str, param: str, advice: str = "") -> InvalidRequestError:
    """Return the error for a source that can't be honoured."""
    message = f"The {what} can't be honoured: {why.removesuffix('.')}."
    return InvalidRequestError(f"{message} {advice}".rstrip(), param)
