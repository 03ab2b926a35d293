"""Keeps each of schemathesis' cases cheap: the engine runs for all, but not for long.

Only what is valid is changed, into something else that is valid; what schemathesis broke on purpose
goes out as it is.
"""

from typing import Any

import schemathesis

MAX_TOKENS = 4
MODEL, CLASSIFIER = "pydoc-chat", "pydoc-detector"
LENGTHS = ("max_tokens", "max_completion_tokens", "min_tokens")
FAMILIAR: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What does os.path.join do?"}],
    "logit_bias": {"5": 1},
    "stop_token_ids": [5],
    "response_format": {"type": "json_object"},
    "tools": None,
    "tool_choice": None,
    "parallel_tool_calls": None,
}
"""What stands for values that only the model can judge and so would nearly always be refused."""


@schemathesis.hook
def before_call(
    context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]
) -> None:
    """Ask for a few tokens of a model that is there."""
    body: Any = case.body
    if not isinstance(body, dict) or case.method != "POST":
        return
    classifies = case.path.endswith("/classify")
    if isinstance(body.get("model"), str) and len(body["model"]) % 8:
        body["model"] = CLASSIFIER if classifies else MODEL
    if classifies:
        return
    for name in LENGTHS:
        if is_count(body.get(name)):
            body[name] = MAX_TOKENS
    # Those with a seed stay as they were drawn.
    if case.meta is not None and case.meta.generation.mode.is_positive and not body.get("seed"):
        body |= {name: FAMILIAR[name] for name in FAMILIAR if body.get(name)}
    if "max_completion_tokens" not in body:
        body.setdefault("max_tokens", MAX_TOKENS)
    if is_count(body.get("n")):
        body["n"] = min(body["n"], 2)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1
