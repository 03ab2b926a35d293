"""Requests of every kind, each long enough that its replica can be killed in the middle."""

from collections.abc import Mapping
from random import Random
from typing import Any

from models.training.drawings import random_drawing
from tests.images import data_uri

Body = Mapping[str, Any]

NUM_TOKENS = 400
MODEL = "pydoc-chat"


def about(name: str, max_tokens: int = NUM_TOKENS, **options: Any) -> dict[str, Any]:
    """Return a question with an answer of this length, unless an option ends it before."""
    messages = [{"role": "user", "content": f"What does {name} do?"}]
    return {
        "model": MODEL,
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        **options,
    }


def constrained(name: str, **options: Any) -> dict[str, Any]:
    """Return a question whose answer's form says when it ends."""
    return about(name, **SEEDED, max_tokens=700, min_tokens=0, **options)


SEEDED: dict[str, Any] = {"temperature": 1.3, "seed": 15}

ROW = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{4,9}$"},
        "number": {"type": "integer", "minimum": 10, "maximum": 9999},
    },
    "required": ["name", "number"],
    "additionalProperties": False,
}
ROWS = {
    "type": "object",
    "properties": {"rows": {"type": "array", "minItems": 14, "maxItems": 14, "items": ROW}},
    "required": ["rows"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "store", "parameters": ROWS}}


def _picture() -> list[dict[str, Any]]:
    image = {
        "type": "image_url",
        "image_url": {"url": data_uri(random_drawing(Random(15)).render())},
    }
    return [
        {"role": "user", "content": [image, {"type": "text", "text": "What is in the picture?"}]}
    ]


KINDS: Mapping[str, Body] = {
    "greedy": about("os.path.join"),
    "seeded": about("os.path.split", **SEEDED),
    "json_schema": constrained(
        "os.stat",
        response_format={"type": "json_schema", "json_schema": {"name": "rows", "schema": ROWS}},
    ),
    "regex": constrained(
        "os.walk", structured_outputs={"regex": "([a-z]{3,8} [0-9]{2,4}, ){40}end"}
    ),
    "tools": constrained(
        "json.dumps", tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    ),
    "several": about("json.loads", **SEEDED, n=3),
    "logprobs": about("re.match", **SEEDED, logprobs=True, top_logprobs=5),
    "min_tokens": about("re.sub", **SEEDED, min_tokens=300),
    "penalties": about(
        "time.sleep",
        **SEEDED,
        frequency_penalty=0.6,
        presence_penalty=0.4,
        repetition_penalty=1.1,
        logit_bias={"100": 2, "200": -3},
    ),
    "image": about("", messages=_picture()),
    # Tokens after the end have no text; without log-probabilities their client would see no event.
    "ignore_eos": about("os.walk", min_tokens=0, ignore_eos=True, logprobs=True),
}
"""`stop` is missing: `split_stop` makes it from an answer."""


def split_stop(tokens: list[str], at_least: int) -> str:
    """Return a string that first occurs across two of an answer's tokens, behind `at_least`."""
    text = "".join(tokens)
    for index in range(at_least, len(tokens) - 1):
        before = "".join(tokens[:index])
        stop = tokens[index][-2:] + tokens[index + 1][:2]
        halves = len(tokens[index]) >= 2 and len(tokens[index + 1]) >= 2
        if halves and text.find(stop) == len(before) + len(tokens[index]) - 2:
            return stop
    raise AssertionError("no string occurs first across two tokens")
