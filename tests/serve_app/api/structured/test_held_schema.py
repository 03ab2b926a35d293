"""What generators write for the limits of their types is held as far as a grammar can hold it."""

import json
from typing import Any

import httpx
import pytest

from deployments.contract.errors import InvalidRequestError
from deployments.contract.grammar import probe
from serve_app.api.structured.answer_grammar import GrammarSettings
from serve_app.api.structured.json_schema_grammar import (
    LENIENT,
    MAX_NUM_EXAMINED,
    MAX_NUM_RELIEVED,
    STRICT,
    json_schema_grammar,
)
from serve_app.api.structured.structural_tag import StructuralTag
from serve_app.api.structured.structural_tag_grammar import structural_tag_grammar
from serve_app.config import AppConfig, LimitsConfig
from serve_app.http.warning_header import WARNING_HEADER
from serve_app.ingress import AppParts, build_app
from tests.offenders import every, for_each
from tests.serve_app.api.structured.accepting import takes
from tests.serve_app.apps import client_of
from tests.serve_app.fakes import FakeBackend

SETTINGS = GrammarSettings(LimitsConfig())
LARGEST = 2**63 - 1024
"""What a double and a signed integer of 64 bits both hold exactly."""
FLOAT = 3.4028234663852886e38
DOUBLE = 1.7976931348623157e308


@pytest.fixture
def num_compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compile in this process; return the grammars that were."""
    grammars: list[str] = []

    def run(_job: str, grammar: str, _seconds: int) -> dict[str, Any]:
        grammars.append(grammar)
        return probe._compiled(grammar)

    monkeypatch.setattr(probe, "_run", run)
    return grammars


def integer(**bounds: Any) -> dict[str, Any]:
    return {"type": "integer", **bounds}


def number(**bounds: Any) -> dict[str, Any]:
    return {"type": "number", **bounds}


@pytest.mark.usefixtures("num_compiled")
@pytest.mark.parametrize("style", [LENIENT, STRICT], ids=["lenient", "strict"])
@for_each(
    (integer(minimum=-(2**63), maximum=2**63 - 1), [-LARGEST, 2**63 - 1], [2**63, -(2**63) - 1]),
    (integer(exclusiveMinimum=-(2**63) - 1, exclusiveMaximum=2**63), [-5, 2**63 - 1], [2**63]),
    ({"allOf": [integer(), {"minimum": -(2**63), "maximum": 2**63 - 1}]}, [-5], [2**63]),
    (integer(minimum=-(2**53) - 1), [-(2**53)], [-(2**53) - 2]),
    (integer(minimum=10**18, maximum=2**63 - 1), [10**18 + 1], [10**18 - 1]),
    (integer(minimum=-(10**400), maximum=10**400), [10**30, -(10**30)], []),
    (number(minimum=-DOUBLE, maximum=DOUBLE), [1e300, -2.5], []),
    (number(minimum=-1.797e308, maximum=1.797e308), [1e300, -2.5], []),
    (number(minimum=5e-324), [0.5], [0, -1]),
    (number(minimum=-1, maximum=-5e-324), [-0.5], [0, 1]),
    (number(exclusiveMinimum=1e-300, exclusiveMaximum=2), [0.5], [0, 2]),
    (number(minimum=4.9e-324, exclusiveMinimum=True), [0.5], [0]),
    ({"type": "string", "maxLength": 2**63 - 1}, ["a"], []),
    ({"type": "string", "maxLength": 2.0}, ["ab"], ["abc"]),
    ({"type": "string", "minLength": -3}, [""], []),
    ({"type": "array", "items": integer(), "maxItems": 10**30}, [[1]], ["a"]),
    (integer(multipleOf=3000000), [6000000], [5]),
    ({"enum": [2**63 - 1, 2**53, 10**19]}, [2**63 - 1, 10**19], [2**63 - 2]),
    ({"type": "string", "pattern": "^[a&&b]$"}, ["&"], ["c"]),
    ({"type": "object", "patternProperties": {r"^\cA$": integer()}, "additionalProperties": False},
     [{"\x01": 1}], [{"\x01": "a"}, {"b": 1}]),
    ({"$schema": "http://json-schema.org/schema#", "type": "integer"}, [1], ["a"]),
)  # fmt: skip
def test_limits_of_any_size_are_held(
    schema: dict[str, Any], valid: list[Any], invalid: list[Any], style: Any
) -> None:
    found = json_schema_grammar(schema, SETTINGS, style=style)
    assert found.unheld == ()
    assert [each for each in valid if not takes(found.text, _json(each))] == []
    assert [each for each in invalid if takes(found.text, _json(each))] == []


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.usefixtures("num_compiled")
# A schema, what is left out of it, and what it allows then.
@for_each(
    (integer(minimum=0, maximum=2**64 - 1), [f"maximum {2**64 - 1}"], 2**64 - 1),
    (number(minimum=-FLOAT, maximum=FLOAT), [f"maximum {FLOAT}", f"minimum -{FLOAT}"], 1e30),
    (integer(minimum=10**18), [f"minimum {10**18}"], 10**18),
    (integer(maximum=-(10**18)), [f"maximum -{10**18}"], -(10**18)),
    (integer(minimum="5"), ['minimum "5"'], 1),
    ({"type": "string", "minLength": 2**40}, [f"minLength {2**40}"], "a"),
    ({"type": "string", "maxLength": "5"}, ['maxLength "5"'], "a"),
    (integer(multipleOf=0), ["multipleOf 0"], 1),
    (integer(multipleOf=1000003), ["multipleOf 1000003"], 5),
    (number(multipleOf=0.1 + 0.2), ["multipleOf 0.30000000000000004"], 0.5),
    ({"enum": [9007199254740993]}, ["enum [9007199254740993]"], 9007199254740993),
    ({"const": {"a": [-(2**63)]}}, ["const {\"a\": [-9223372036854775808]}"], {"a": [-(2**63)]}),
    ({"type": "string", "pattern": "^[a--c]$"}, ["patterns that ECMA-262 does not allow"], "b"),
    ({"type": "string", "pattern": r"^(a{1000}){1000}\p{Nope}$"}, ["pattern"], "a"),
    ({"type": "string", "pattern": r"^\d\d:\d\d$", "format": "time"}, ["format time"], "12:30"),
    ({"type": "object", "properties": {"a": integer()}, "patternProperties": {"^(?!b)": integer()}},
     ["look-around in patterns"], {"b": "x"}),
    ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}, "additionalProperties": False},
     ["patternProperties"], {"ab": 1}),
)  # fmt: skip
def test_what_can_not_be_held_is_left_out_and_named(
    schema: dict[str, Any], unheld: list[str], valid: Any
) -> None:
    found = json_schema_grammar(schema, SETTINGS, style=LENIENT)
    assert list(found.unheld) == unheld
    assert takes(found.text, _json(valid))


@pytest.mark.usefixtures("num_compiled")
@for_each(
    (integer(minimum=10**18), "minimum 1000000000000000000 can't be enforced"),
    ({"enum": [9007199254740993]}, "enum [9007199254740993] can't be enforced"),
    ({"pattern": r"\bword"}, "word boundaries in patterns can't be enforced"),
    ({"pattern": "^[a--c]$"}, "'^[a--c]$' is not one: a range that is out of order"),
    ({"patternProperties": {"^(?!b)": {}}}, "look-around in patterns can't be enforced"),
    ({"type": "string", "minLength": "5"}, "minLength"),
)
def test_a_strict_schema_is_refused_for_what_it_can_not_do_without(
    schema: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        json_schema_grammar(schema, SETTINGS, style=STRICT)
    assert why in refused.value.message
    assert "Without strict: true" in refused.value.message


@pytest.mark.usefixtures("num_compiled")
def test_a_strict_schema_has_narrower_limits_rather_than_none() -> None:
    found = json_schema_grammar(number(minimum=-FLOAT, maximum=FLOAT), SETTINGS, style=STRICT)
    assert takes(found.text, "-12.5")
    assert not takes(found.text, str(10**30)), "valid, but the limit can't be told from larger ones"
    found = json_schema_grammar(integer(minimum=0, maximum=2**64 - 1), SETTINGS, style=STRICT)
    assert takes(found.text, str(2**63 - 1))
    assert not takes(found.text, str(2**64))


def test_only_so_many_parts_are_examined(num_compiled: list[str]) -> None:
    properties = {f"p{at}": {"pattern": f"^\\p{{Nope{at}}}$"} for at in range(50)}
    with pytest.raises(InvalidRequestError, match="Unicode property not found"):
        json_schema_grammar({"properties": properties}, SETTINGS, style=LENIENT)
    # Each part is compiled with the pattern and without; the whole at the beginning and the end.
    assert len(num_compiled) <= MAX_NUM_EXAMINED + 4


@pytest.mark.usefixtures("num_compiled")
def test_a_structural_tag_does_without_what_can_not_be_compiled() -> None:
    schema = {"type": "string", "pattern": r"\p{Nope}"}
    tag = StructuralTag.model_validate(
        {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    )
    found = structural_tag_grammar(tag, SETTINGS, "the.field")
    assert found.unheld == ("pattern",)
    assert takes(found.text, '"a"')


MANY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": integer(minimum=-(2**63), maximum=2**63 - 1),
        "hash": integer(minimum=0, maximum=2**64 - 1),
        "name": {"type": "string", "maxLength": 2**63 - 1, "pattern": r"^[^[]\cA?(?!b)$"},
        "kind": {"type": "string", "pattern": r"^\p{Nope}$"},
        "at": {"type": "string", "format": "time", "pattern": r"^\d\d:\d\d$"},
    },
    "required": ["id", "hash", "name", "kind", "at"],
}
LEFT_OUT_OF_MANY = ["format time", "look-around in patterns", f"maximum {2**64 - 1}", "pattern"]
ANSWER = '{"id": 1, "hash": 18446744073709551615, "name": "a", "kind": "x", "at": "12:30"}'
FUNCTION = {"name": "f", "parameters": MANY}
HI = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
ROUTES: list[tuple[str, str, dict[str, Any]]] = [
    ("response_format", "/v1/chat/completions",
     {**HI, "response_format": {"type": "json_schema",
                                "json_schema": {"name": "n", "schema": MANY}}}),
    ("forced tool", "/v1/chat/completions",
     {**HI, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}),
    ("messages", "/v1/messages",
     {**HI, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": MANY}}}),
    ("messages' tool", "/v1/messages",
     {**HI, "max_tokens": 9, "tools": [{"name": "f", "input_schema": MANY}],
      "tool_choice": {"type": "any"}}),
    ("responses", "/v1/responses",
     {"model": "m", "input": "Hi",
      "text": {"format": {"type": "json_schema", "name": "n", "schema": MANY}}}),
    ("responses' tool", "/v1/responses",
     {"model": "m", "input": "Hi", "tools": [{"type": "function", **FUNCTION}],
      "tool_choice": "required"}),
]  # fmt: skip


@pytest.mark.usefixtures("num_compiled")
async def test_every_route_holds_and_names_the_same(config: AppConfig) -> None:
    backend = FakeBackend(tool_call_format="hermes")
    async with client_of(build_app(AppParts(config, {"m": backend}))) as client:
        for case in every(ROUTES):
            with case as (name, route, body):
                answer = await client.ask(route, body)
                told = "Not enforced in JSON schemas: " + ", ".join(LEFT_OUT_OF_MANY)
                assert answer.headers[WARNING_HEADER] == told
                grammar = backend.requests[-1].sampling.grammar or ""
                call = f'<tool_call>{{"name": "f", "arguments": {ANSWER}}}</tool_call>'
                assert takes(grammar, call.replace(">{", ">\n{").replace("}<", "}\n<")
                             if "tool" in name else ANSWER)  # fmt: skip


def faulty_tools(num_tools: int) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": f"f{at}",
                "parameters": {"properties": {"p": {"pattern": rf"^\p{{Nope{at}}}$"}}},
            },
        }
        for at in range(num_tools)
    ]


@pytest.mark.parametrize("num_tools", [MAX_NUM_RELIEVED, 200])
async def test_only_so_many_tools_do_without_what_can_not_be_compiled(
    num_compiled: list[str], config: AppConfig, num_tools: int
) -> None:
    backend = FakeBackend(tool_call_format="hermes")
    transport = httpx.ASGITransport(build_app(AppParts(config, {"m": backend})))
    body = {**HI, "tools": faulty_tools(num_tools), "tool_choice": "required"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == (200 if num_tools == MAX_NUM_RELIEVED else 400), answer.text
    # For each: bisection, its part with the pattern and without, and the whole again.
    assert len(num_compiled) <= 1 + (MAX_NUM_RELIEVED + 1) * (num_tools.bit_length() + 4)
