"""From a client's JSON schema to a grammar that the engine follows.

Whatever the grammar lets through is JSON that the schema holds to be valid. So a keyword that can't
be honoured is refused by name, as is a schema that is too large, or takes too long to compile.

The JSON is compact but for one space, which may stand where JSON allows any: with free whitespace
small models write nothing else for long.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from llguidance import LLMatcher

from deployments.engine.grammar_probe import MAX_NUM_PROBES, find_fault
from deployments.errors import InvalidRequestError
from deployments.work_line import WorkLine
from serve_app.config import LimitsConfig

ANY_OBJECT: Final[Mapping[str, object]] = {"type": "object"}
OPTIONS: Final = "x-guidance"
"""The schema's key that llguidance reads its options from."""

MAX_NUM_SCHEMAS: Final = 256
"""Requests whose schemas are compiled or wait for it, in one ingress: each may take a second."""

_MAX_ECHO = 200
_COMPACT = {"whitespace_flexible": False, "whitespace_pattern": "[ ]?"}


def schema_line() -> WorkLine:
    """Return where to call `json_schema_grammar`.

    On the event loop's own threads, schemas that wait for each other would hold up images.
    """
    threads = ThreadPoolExecutor(MAX_NUM_PROBES, thread_name_prefix="schema")
    return WorkLine(threads, MAX_NUM_PROBES, MAX_NUM_SCHEMAS, "JSON schemas")


def json_schema_grammar(
    schema: Mapping[str, object], limits: LimitsConfig, param: str = "response_format"
) -> str:
    """Return the grammar of the JSON texts that are valid by a schema, for `SamplingParams`.

    It may take up to `limits.max_schema_compile_s`, so call it in a `schema_line`.

    Args:
        schema: JSON Schema, the parts of it that llguidance knows.
        limits: How large it may be.
        param: The field that it came in.

    Raises:
        InvalidRequestError: The schema is too large or can't be honoured.
    """
    text = json.dumps(constrained_schema(schema, limits, param))
    try:
        grammar = LLMatcher.grammar_from_json_schema(text)
    except ValueError as error:
        raise _refusal(str(error), param) from None
    fault = find_fault(grammar, limits.max_schema_compile_s)
    if fault is not None:
        raise _refusal(fault, param)
    return grammar


def constrained_schema(
    schema: Mapping[str, object], limits: LimitsConfig, param: str = "response_format"
) -> dict[str, object]:
    """Return a schema with our options, as it may stand in a larger grammar behind `%json`.

    Raises:
        InvalidRequestError: The schema is too large.
    """
    if OPTIONS in schema:
        raise _refusal(f"{OPTIONS} is not accepted", param)
    _check_depth(schema, limits.max_schema_depth, param)
    if len(json.dumps(schema)) > limits.max_schema_bytes:
        why = f"it is larger than {limits.max_schema_bytes} bytes (limits.max_schema_bytes)"
        raise _refusal(why, param)
    return {**schema, OPTIONS: _COMPACT}


def _check_depth(schema: object, max_depth: int, param: str) -> None:
    level = [schema]
    for _ in range(max_depth):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise _refusal(f"it is nested deeper than {max_depth} levels (limits.max_schema_depth)", param)


def _children(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []


def _refusal(why: str, param: str) -> InvalidRequestError:
    # What llguidance advises is about options of its own.
    why = why.partition(". Enable ")[0][:_MAX_ECHO]
    return InvalidRequestError(f"The JSON schema can't be honoured: {why}.", param)
