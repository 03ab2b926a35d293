"""Which schemas become grammars, and how the others are refused."""

from typing import Any

import pytest

from deployments.engine.grammar_probe import EXCEEDED, IMPOSSIBLE
from deployments.errors import InvalidRequestError
from serve_app.api.json_schema_grammar import constrained_schema, json_schema_grammar
from serve_app.config import LimitsConfig

LIMITS = LimitsConfig(max_schema_bytes=200_000)

UNSUPPORTED_KEYWORDS: dict[str, Any] = {
    "contains": {},
    "dependencies": {},
    "dependentRequired": {},
    "dependentSchemas": {},
    "if": {},
    "minContains": 1,
    "not": {},
    "propertyNames": {},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "uniqueItems": True,
}


def refusal(schema: Any, limits: LimitsConfig = LIMITS) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        json_schema_grammar(schema, limits, "tools")
    assert refused.value.param == "tools"
    assert len(refused.value.message) < 300
    return refused.value.message


def test_a_schema_becomes_a_grammar() -> None:
    assert '"type": "object"' in json_schema_grammar({"type": "object"}, LIMITS)


@pytest.mark.parametrize("keyword", UNSUPPORTED_KEYWORDS)
def test_a_keyword_that_cannot_be_honoured_is_refused_by_name(keyword: str) -> None:
    inner = {"type": ["object", "array"], keyword: UNSUPPORTED_KEYWORDS[keyword]}
    assert keyword in refusal({"type": "object", "properties": {"a": inner}})


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "string", "format": "nope"}, "nope"),
        ({"type": "string", "pattern": "(?=a)b"}, "regex"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"$ref": "http://169.254.169.254/latest"}, "169.254.169.254"),
        ({"enum": []}, "empty"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
        ({"type": "nope"}, "nope"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ({"$ref": "#"}, IMPOSSIBLE),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused(schema: Any, word: str) -> None:
    assert word in refusal(schema)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_a_schema_may_be_as_deep_as_the_limit_and_no_deeper() -> None:
    limits = LimitsConfig(max_schema_depth=9)
    json_schema_grammar(nested(9), limits)
    assert "max_schema_depth" in refusal(nested(10), limits)
    assert "max_schema_depth" in refusal(nested(100_000), LimitsConfig(max_schema_depth=100))


def test_the_deepest_schema_of_all_limits_is_within_the_librarys() -> None:
    json_schema_grammar(nested(100), LimitsConfig(max_schema_depth=100))


def test_a_schema_may_be_as_large_as_the_limit_and_no_larger() -> None:
    limits = LimitsConfig(max_schema_bytes=64)
    empty = len('{"title": ""}')
    json_schema_grammar({"title": "x" * (64 - empty)}, limits)
    assert "max_schema_bytes" in refusal({"title": "x" * (65 - empty)}, limits)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "integer", "multipleOf": m} for m in (97, 89, 83, 79)]},
        {
            "allOf": [
                {"anyOf": [{"type": "string", "pattern": f"^{j % 2}{i}.*{j}"} for i in range(8)]}
                for j in range(5)
            ]
        },
    ],
    ids=["multiples", "alternatives"],
)
def test_a_schema_that_would_compile_for_long_is_given_up(schema: Any) -> None:
    assert EXCEEDED in refusal(schema)


def test_an_object_of_too_many_properties_is_refused_before_any_text() -> None:
    properties = {f"p{i}": {"type": "string"} for i in range(1500)}
    assert "items" in refusal({"type": "object", "properties": properties})


def test_options_of_the_schemas_own_are_not_taken() -> None:
    options = constrained_schema({"type": "object"}, LIMITS)["x-guidance"]
    assert options == {"whitespace_flexible": False, "whitespace_pattern": "[ ]?"}
