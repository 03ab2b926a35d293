"""Keeps schemathesis' cases cheap: the engine runs for each of them, but not for long.

Only valid cases are changed, and they stay valid. Cases that schemathesis broke on purpose are sent
unchanged.
"""

import ast
from threading import Lock
from typing import Any

import schemathesis

EMBEDDER, RERANKER = "tiny-embedder", "tiny-reranker"  # of `tiny_poolers`, which imports torch

MAX_TOKENS = 4
MODEL = "pydoc-chat"
POOLERS = {
    "/classify": "pydoc-detector",
    "/embeddings": EMBEDDER,
    "/rerank": RERANKER,
    "/score": EMBEDDER,
}
"""The model that is asked, by the end of a path; another one generates."""
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
FAMILIAR: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What does os.path.join do?"}],
    "logit_bias": {"5": 1},
    "stop_token_ids": [5],
    "response_format": {"type": "json_object"},
    "structured_outputs": {"json_object": True},
    "guided_json": {"type": "object"},
    "guided_regex": "a|b",
    "guided_grammar": 'start: "a" | "b"',
    "guided_whitespace_pattern": "[ ]?",
    "structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}',
    "tools": None,
    "tool_choice": None,
    "parallel_tool_calls": None,
}
"""Substitutes for values that only the model can validate, and would nearly always refuse."""


_parsing = Lock()
_parse = ast.parse


def _parse_alone(*args: Any, **kwargs: Any) -> Any:
    """Parse while no other thread does: hypothesis parses the sources of functions.

    CPython before 3.11.9 counts the depth of all threads together, and may then raise SystemError.
    Source: https://github.com/python/cpython/issues/106905
    """
    with _parsing:
        return _parse(*args, **kwargs)


ast.parse = _parse_alone

CONSTRAINED = ("ChatRequest", "CompletionRequest")


@schemathesis.hook
def before_load_schema(context: schemathesis.HookContext, raw_schema: dict[str, Any]) -> None:
    """Drop the rule that constraints exclude each other: the last, and one of seven alternatives.

    schemathesis can't generate cases if these alternatives multiply those of other rules. Cases
    that break the rule get a 400, which is expected of valid cases, too.
    """
    for name in CONSTRAINED:
        *rules, exclusion = raw_schema["components"]["schemas"][name]["allOf"]
        assert len(exclusion["anyOf"]) == 7, "the rule has moved"
        raw_schema["components"]["schemas"][name]["allOf"] = rules


@schemathesis.hook
def before_call(
    context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]
) -> None:
    """Ask a served model for a few tokens."""
    body: Any = case.body
    if not isinstance(body, dict) or case.method != "POST":
        return
    pooler = next((own for end, own in POOLERS.items() if case.path.endswith(end)), None)
    if isinstance(body.get("model"), str) and len(body["model"]) % 8:
        body["model"] = pooler or MODEL
    if pooler is not None:
        return
    for name in LENGTHS:
        if is_count(body.get(name)):
            body[name] = MAX_TOKENS
    # Cases with a seed are not changed.
    if case.meta is not None and case.meta.generation.mode.is_positive and not body.get("seed"):
        body |= {name: FAMILIAR[name] for name in FAMILIAR if body.get(name)}
    if case.path.endswith("/responses"):
        body.setdefault("max_output_tokens", MAX_TOKENS)
    elif "max_completion_tokens" not in body and not case.path.endswith("/count_tokens"):
        body.setdefault("max_tokens", MAX_TOKENS)
    if is_count(body.get("n")):
        body["n"] = min(body["n"], 2)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1
