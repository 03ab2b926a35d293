"""Closing a schema's objects forbids what they don't list, and nothing that a schema asks for."""

import json
from itertools import product
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app.api.structured.closed_schema import closed
from tests.offenders import for_each

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {}}, "required": ["b"]}


def is_valid(value: Any, schema: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def test_an_object_that_lists_properties_has_no_others() -> None:
    assert closed(A) == {**A, "additionalProperties": False}
    assert "additionalProperties" not in A


@for_each(
    lambda inner: {"type": "array", "items": inner},
    lambda inner: {"anyOf": [inner, {"type": "null"}], "default": None},
    lambda inner: {"allOf": [inner], "title": "One"},
    lambda inner: {"$defs": {"x": inner}, "$ref": "#/$defs/x"},
    lambda inner: {"properties": {"p": inner}},
    lambda inner: {"additionalProperties": inner},
    lambda inner: {"$defs": {"a/b": inner}, "items": {"$ref": "#/$defs/a~1b"}},
)
def test_an_object_is_closed_wherever_it_alone_decides(around: Any) -> None:
    assert str(closed(around(A))).count("'additionalProperties': False") >= 1
    made = closed(around(A))
    assert A not in [made, *_values(made)]


def _values(value: Any) -> list[Any]:
    inner = (
        list(value.values())
        if isinstance(value, dict)
        else value
        if isinstance(value, list)
        else []
    )
    return [*inner, *(each for child in inner for each in _values(child))]


@for_each(
    {**A, "additionalProperties": True},
    {**A, "additionalProperties": {"type": "string"}},
    {**A, "unevaluatedProperties": {"type": "string"}},
    {**A, "minProperties": 2},
    {**A, "const": {"a": 1, "c": 2}},
    {**A, "propertyNames": {"pattern": "^[bc]$"}},
    {**A, "if": {}, "then": {"required": ["c"]}},
    {**A, "dependentRequired": {"a": ["c"]}},
    {"allOf": [A, B]},
    {"$ref": "#/$defs/a", "required": ["c"], "$defs": {"a": A}},
    {"anyOf": [A, B], "required": ["c"]},
    {"not": A},
    {"type": "object"},
    {"type": "array", "items": A, "contains": B},
    {"properties": {"x": A}, "patternProperties": {"^x": B}, "additionalProperties": False},
    {"$defs": {"a": {**A, "$anchor": "here"}}, "items": {"$ref": "#here"}},
)
def test_an_object_stays_open_if_it_or_another_schema_says_more(schema: Any) -> None:
    assert closed(schema) == schema


def test_a_definition_that_is_used_beside_others_stays_open_everywhere() -> None:
    schema = {"$defs": {"a": A}, "items": {"$ref": "#/$defs/a"}, "allOf": [{"items": B}]}
    assert closed(schema)["$defs"] == {"a": A}


def test_what_is_required_may_be_anything_if_it_is_not_listed() -> None:
    made = closed({**A, "required": ["c"]})
    assert is_valid({"c": [1]}, made)
    assert not is_valid({"c": 1, "d": 1}, made)


def test_properties_by_pattern_are_kept() -> None:
    made = closed({**A, "patternProperties": {"^x-": {"type": "string"}}})
    assert is_valid({"x-b": "c"}, made)
    assert not is_valid({"b": "c"}, made)


def test_a_false_for_unevaluated_properties_means_the_same() -> None:
    made = closed({**A, "unevaluatedProperties": False})
    assert made == {**A, "additionalProperties": False}


def test_names_and_data_that_look_like_keywords_are_left_alone() -> None:
    schema = {"properties": {"properties": {"type": "integer"}, "const": A}, "default": {**A}}
    made = closed(schema)
    assert made["default"] == A
    assert made["properties"]["properties"] == {"type": "integer"}
    assert made["properties"]["const"]["additionalProperties"] is False


def test_a_schema_that_refers_to_itself_is_closed() -> None:
    tree = {**A, "properties": {"next": {"$ref": "#"}}}
    assert closed(tree) == {**tree, "additionalProperties": False}


NAMES = ("a", "b", "c")
LEAVES: list[Any] = [1, "x", {}, {"a": 1}, {"b": 1}, {"a": 1, "b": "x"}]
ABSENT = object()
UNIVERSE = [
    1,
    {},
    *(
        {name: value for name, value in zip(NAMES, values, strict=True) if value is not ABSENT}
        for values in product([ABSENT, *LEAVES], repeat=3)
    ),
]


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> Any:
    names = st.lists(st.sampled_from(NAMES), unique=True, max_size=2)
    some: dict[str, Any] = {
        "properties": {name: draw(inner) for name in draw(names)},
        "required": draw(names),
        "minProperties": draw(st.integers(0, 3)),
        "patternProperties": {"^[ab]$": draw(inner)},
        "propertyNames": {"enum": draw(names)},
        "dependentRequired": {"a": ["b"]},
    }
    kept = draw(st.lists(st.sampled_from(sorted(some)), unique=True, min_size=1, max_size=3))
    return {"properties": some["properties"], **{keyword: some[keyword] for keyword in kept}}


def _combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        _objects(inner),
        st.tuples(st.sampled_from(["allOf", "anyOf", "oneOf"]), several).map(
            lambda pair: {pair[0]: pair[1]}
        ),
        st.tuples(_objects(inner), several).map(lambda pair: {**pair[0], "allOf": pair[1]}),
        st.tuples(_objects(inner), several).map(lambda pair: {**pair[0], "anyOf": pair[1]}),
        inner.map(lambda each: {"$ref": "#/$defs/shared", "not": each}),
    )


SHARED = {"properties": {"a": {"type": "integer"}}, "required": ["b"]}
SCHEMAS = st.recursive(
    st.sampled_from([{}, {"type": "integer"}, {"type": "object"}, {"$ref": "#/$defs/shared"}]),
    _combined,
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(SCHEMAS)
@example({"oneOf": [{}, {"$ref": "#/$defs/shared"}]})
def test_a_schema_that_some_value_satisfies_stays_satisfiable(schema: Any) -> None:
    schema = {**schema, "$defs": {"shared": SHARED}}
    made = closed(schema)
    before = jsonschema.Draft202012Validator(schema)
    after = jsonschema.Draft202012Validator(made)
    if any(before.is_valid(value) for value in UNIVERSE):
        assert any(after.is_valid(value) for value in UNIVERSE)
    # `oneOf` may leave a value that two of its schemas allowed to one of them. Grammars read it as
    # `anyOf` there, and the answer's header says so.
    if "oneOf" not in json.dumps(schema):
        assert not any(after.is_valid(v) and not before.is_valid(v) for v in UNIVERSE)
