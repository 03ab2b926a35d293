"""Schemas become grammars or are refused, and the embedded model's answers are valid by them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.contract.errors import InvalidRequestError
from deployments.contract.grammar.probe import EXCEEDED, IMPOSSIBLE
from deployments.contract.output import FinishReason
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import load_model
from deployments.engine.scheduling.sequence import SequenceRequest
from serve_app.api.structured.answer_grammar import GrammarSettings
from serve_app.api.structured.json_schema_grammar import (
    STRICT,
    constrained_schema,
    json_schema_grammar,
)
from serve_app.config import LimitsConfig
from tests.engine.collector import Collector
from tests.offenders import for_each

FOLDER = Path(__file__).resolve().parents[4] / "models/pydoc-chat"
NUM_TOGETHER = 6
MAX_TOKENS = 120

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
        json_schema_grammar(schema, GrammarSettings(limits), "tools")
    assert refused.value.param == "tools"
    assert len(refused.value.message) < 400
    return refused.value.message


def grammar_of(schema: Any, limits: LimitsConfig = LIMITS, *, closes_objects: bool = True) -> str:
    return json_schema_grammar(schema, GrammarSettings(limits, closes_objects)).text


def test_a_schema_becomes_a_grammar() -> None:
    assert '"type": "object"' in grammar_of({"type": "object"})


@for_each(*UNSUPPORTED_KEYWORDS)
def test_a_keyword_that_cannot_be_honoured_is_refused_by_name(keyword: str) -> None:
    inner = {"type": ["object", "array"], keyword: UNSUPPORTED_KEYWORDS[keyword]}
    assert keyword in refusal({"type": "object", "properties": {"a": inner}})


@for_each(
    ({"type": "string", "format": "nope"}, "nope"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around in patterns"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    ({"$ref": "#/$defs/missing"}, "missing"),
    ({"$ref": "http://169.254.169.254/latest"}, "169.254.169.254"),
    ({"enum": []}, "empty"),
    ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
    ({"type": "nope"}, "nope"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
    ({"$ref": "#"}, IMPOSSIBLE),
)
def test_a_schema_that_cannot_be_honoured_is_refused(schema: Any, word: str) -> None:
    assert word in refusal(schema)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.slow
def test_a_schema_may_be_as_deep_as_the_limit_and_no_deeper() -> None:
    limits = LimitsConfig(max_schema_depth=9)
    grammar_of(nested(9), limits)
    assert "max_schema_depth" in refusal(nested(10), limits)
    assert "max_schema_depth" in refusal(nested(100_000), LimitsConfig(max_schema_depth=100))


def test_the_deepest_configurable_schema_is_within_the_library_s_limit() -> None:
    grammar_of(nested(100), LimitsConfig(max_schema_depth=100))


def test_a_schema_may_be_as_large_as_the_limit_and_no_larger() -> None:
    limits = LimitsConfig(max_schema_bytes=64)
    empty = len('{"title": ""}')
    grammar_of({"title": "x" * (64 - empty)}, limits)
    assert "max_schema_bytes" in refusal({"title": "x" * (65 - empty)}, limits)


@pytest.mark.slow
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
def test_a_schema_that_compiles_too_long_is_refused(schema: Any) -> None:
    assert EXCEEDED in refusal(schema)


def test_an_object_with_too_many_properties_is_refused() -> None:
    properties = {f"p{i}": {"type": "string"} for i in range(1500)}
    assert "items" in refusal({"type": "object", "properties": properties})


def test_a_schema_s_own_options_are_not_accepted() -> None:
    bound = constrained_schema({"type": "object"}, GrammarSettings(LIMITS), "tools", STRICT)
    assert bound.schema["x-guidance"] == {
        "whitespace_flexible": False,
        "whitespace_pattern": "[ ]?",
        "lenient": False,
    }


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=5)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-999, 999), NAMES)
INTERVALS = st.tuples(st.integers(-300, 300), st.integers(0, 500)).map(lambda t: (t[0], sum(t)))


def _strings() -> st.SearchStrategy[Any]:
    lengths = st.tuples(st.integers(0, 3), st.integers(0, 6))
    return st.one_of(
        lengths.map(lambda t: {"type": "string", "minLength": t[0], "maxLength": sum(t)}),
        st.sampled_from(["^[a-f]{2,4}$", "^(x|yz)+$", "^\\d{3}-\\w$"]).map(
            lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 12}
        ),
        st.sampled_from(["date", "time", "ipv4", "uuid", "date-time"]).map(
            lambda name: {"type": "string", "format": name}
        ),
    )


def _numbers() -> st.SearchStrategy[Any]:
    return st.tuples(st.sampled_from(["integer", "number"]), INTERVALS).map(
        lambda t: {"type": t[0], "minimum": t[1][0], "maximum": t[1][1]}
    )


LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    _strings(),
    _numbers(),
    st.lists(SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    st.one_of(SCALARS, st.lists(SCALARS, max_size=2)).map(lambda value: {"const": value}),
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[1] + t[2]}
    )
    return st.one_of(
        arrays,
        st.lists(inner, min_size=1, max_size=3).map(
            lambda items: {
                "type": "array",
                "prefixItems": items,
                "items": False,
                "minItems": len(items),
            }
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda any_of: {"anyOf": any_of}),
        _objects(inner),
    )


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> Any:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    additional = draw(st.sampled_from([False, False, {"type": "boolean"}]))
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": additional,
    }


SCHEMAS = st.recursive(LEAVES, _nested, max_leaves=6)


@pytest.fixture(scope="module")
def engine() -> Engine:
    loaded = load_model(str(FOLDER), revision=None, dtype="float32", device=torch.device("cpu"))
    made = Engine(loaded, EngineLimits(NUM_TOGETHER, 256, 64))
    made.warm_up()
    return made


def answers(engine: Engine, schemas: list[Any], seed: int) -> Iterator[tuple[Any, str]]:
    """Yield each schema with the text generated under it, unless the text was cut."""
    collector = Collector(engine)
    for i, schema in enumerate(schemas):
        engine.add(_request(str(i), schema, seed))
    collector.run()
    for i, schema in enumerate(schemas):
        reason = collector.finish_reason(str(i))
        assert reason in (FinishReason.STOP, FinishReason.LENGTH), collector.deltas[str(i)][-1]
        if reason is FinishReason.STOP:
            yield schema, collector.text(str(i))


def _request(name: str, schema: Any, seed: int) -> SequenceRequest:
    params = SamplingParams(
        temperature=1.3,
        seed=seed,
        max_tokens=MAX_TOKENS,
        grammar=grammar_of(schema, LimitsConfig(), closes_objects=False),
    )
    return SequenceRequest(name, (2, 105, 300, 500), params)


@pytest.mark.slow
def test_any_schema_gives_valid_json(engine: Engine) -> None:
    num_whole = 0

    @settings(max_examples=25)
    @given(st.lists(SCHEMAS, min_size=1, max_size=NUM_TOGETHER), st.integers(0, 2**31))
    def hold(schemas: list[Any], seed: int) -> None:
        nonlocal num_whole
        for schema, text in answers(engine, schemas, seed):
            num_whole += 1
            jsonschema.validate(json.loads(text), schema)
            assert "  " not in text or "  " in json.dumps(json.loads(text), ensure_ascii=False)

    hold()
    assert num_whole >= 25


@pytest.mark.slow
def test_a_json_object_may_hold_anything(engine: Engine) -> None:
    found = [text for seed in range(4) for _, text in answers(engine, [{"type": "object"}], seed)]
    assert all(isinstance(json.loads(text), dict) for text in found)


@pytest.mark.slow
def test_a_recursive_schema_gives_a_tree(engine: Engine) -> None:
    tree = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 3},
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    found = [pair for seed in range(6) for pair in answers(engine, [tree], seed)]
    assert found
    for schema, text in found:
        jsonschema.validate(json.loads(text), schema)
