"""`structured_outputs` and the older fields over HTTP: what reaches the replica, and what does not.

The bodies of `DOCUMENTED` are those of vLLM's documentation.
Sources: https://docs.vllm.ai/en/latest/features/structured_outputs/ and, of v0.11,
https://docs.vllm.ai/en/v0.11.2/examples/online_serving/structured_outputs/
"""

import json
import time
from enum import Enum
from itertools import islice, pairwise, product
from string import ascii_lowercase
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, ValidationError

from deployments.contract.errors import InvalidRequestError
from deployments.contract.grammar.limits import parser_limits
from serve_app.api.completions.schema import CompletionRequest
from serve_app.api.structured.answer_grammar import GrammarSettings
from serve_app.api.structured.structured_outputs import StructuredOutputs
from serve_app.config import AppConfig, LimitsConfig
from serve_app.ingress import AppParts, build_app
from tests.offenders import for_each
from tests.serve_app.api.structured.accepting import takes
from tests.serve_app.apps import AppClient, Client, client_of, make_app
from tests.serve_app.fakes import FakeBackend

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
PROMPT: dict[str, Any] = {"model": "m", "prompt": "Hi"}
PLAIN: dict[str, Any] = {"prompt": "Hi", "stream": False}
SURFACES = pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, HI), ("/v1/completions", PROMPT), ("/text-generation", PLAIN)],
    ids=["chat", "completions", "text-generation"],
)


class CarType(str, Enum):  # noqa: UP042 - as in the documentation
    SEDAN = "SEDAN"
    SUV = "SUV"


class CarDescription(BaseModel):
    brand: str
    model: str
    car_type: CarType


SQL = """
root ::= select_statement

select_statement ::= "SELECT " column " from " table " where " condition

column ::= "col_1 " | "col_2 "

table ::= "table_1 " | "table_2 "

condition ::= column "= " number

number ::= "1 " | "2 "
"""
EMAIL = r"[a-z0-9.]{1,20}@\w{6,10}\.com\n"
WEATHER = {
    "type": "structural_tag",
    "structures": [
        {
            "begin": "<function=get_weather>",
            "schema": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
            "end": "</function>",
        }
    ],
    "triggers": ["<function="],
}
CAR = '{"brand": "BMW", "model": "E36", "car_type": "SEDAN"}'
CALL = 'Let me see. <function=get_weather>{"city": "Rome"}</function>'
QUERY = "SELECT col_1  from table_2  where col_1 = 2 "
ADDRESS = "alan.turing@enigma.com\n"
JSON_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "car-description", "schema": CarDescription.model_json_schema()},
}

DOCUMENTED: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"structured_outputs": {"choice": ["positive", "negative"]}}, "positive"),
    "regex": ({"structured_outputs": {"regex": EMAIL}}, ADDRESS),
    "regex with stop": (
        {"structured_outputs": {"regex": r"\w+@\w+\.com\n"}, "stop": ["\n"]},
        "turing@enigma.com\n",
    ),
    "json": ({"response_format": JSON_FORMAT}, CAR),
    "json object": ({"structured_outputs": {"json": CarDescription.model_json_schema()}}, CAR),
    "json text": (
        {"structured_outputs": {"json": json.dumps(CarDescription.model_json_schema())}},
        CAR,
    ),
    "grammar": ({"structured_outputs": {"grammar": SQL}}, QUERY),
    "structural tag": ({"response_format": WEATHER}, CALL),
    "structural tag as text": (
        {"structured_outputs": {"structural_tag": json.dumps(WEATHER)}},
        CALL,
    ),
    "any object": ({"structured_outputs": {"json_object": True}}, '{"a": [1]}'),
    "guided_choice": ({"guided_choice": ["positive", "negative"]}, "negative"),
    "guided_regex": ({"guided_regex": EMAIL, "stop": ["\n"]}, ADDRESS),
    "guided_json": ({"guided_json": CarDescription.model_json_schema()}, CAR),
    "guided_grammar": ({"guided_grammar": SQL}, QUERY),
    "guided_json by a backend": (
        {
            "guided_json": json.dumps(CarDescription.model_json_schema()),
            "guided_decoding_backend": "xgrammar:no-fallback",
            "guided_whitespace_pattern": "[\n ]?",
        },
        CAR.replace(", ", ",\n"),
    ),
}


DOCUMENT = jsonschema.Draft202012Validator(CompletionRequest.model_json_schema())
MAX_COST_S = 0.3
"""For 140 masks, which take a tenth of it; with llguidance's forcing, one of them takes longer."""


async def grammar_for(client: AppClient, backend: FakeBackend, **fields: Any) -> str:
    await client.ask(CHAT, {**HI, **fields})
    grammar = backend.requests[-1].sampling.grammar
    assert grammar is not None
    return grammar


async def refusal(client: AppClient, **fields: Any) -> tuple[str, str]:
    error = await client.refused(CHAT, {**HI, **fields})
    return error["param"], error["message"]


@SURFACES
@for_each(*DOCUMENTED)
async def test_the_bodies_of_vllm_s_documentation_are_honoured(
    name: str, client: Client, path: str, body: dict[str, Any]
) -> None:
    fields, text = DOCUMENTED[name]
    await client.ask(path, {**body, **fields})
    grammar = client.backend.requests[-1].sampling.grammar
    assert grammar is not None
    assert takes(grammar, text)
    assert not takes(grammar, "<function=other>{}")


@for_each(
    ({"structured_outputs": {}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.json"),
    ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag.type"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    ({"guided_regex": "a(b"}, "guided_regex"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
)
async def test_what_can_not_be_honoured_is_refused_by_name(
    fields: dict[str, Any], param: str, client: Client
) -> None:
    assert (await refusal(client, **fields))[0] == param
    assert not client.backend.requests


async def test_a_wrong_name_is_corrected(client: Client) -> None:
    _, message = await refusal(client, structured_outputs={"choices": ["a"]})
    assert "Did you mean 'choice'?" in message


async def test_a_tag_that_comes_as_text_is_refused_in_the_words_of_any_body(client: Client) -> None:
    for tag, words in (("[]", "it is not a JSON object"), ("{}", "type is missing")):
        _, message = await refusal(client, structural_tag=tag)
        assert words in message


async def test_the_field_that_excludes_unmarked_calls_is_named() -> None:
    backend = FakeBackend(tool_call_format="llama3_json")
    async with client_of(make_app(backend)) as asking:
        tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        param, message = await refusal(asking, guided_regex="a", tools=tools)
    assert param == "guided_regex"
    assert "guided_regex" in message
    assert not backend.requests


async def test_white_space_and_further_properties_are_as_the_options_say(client: Client) -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "type": "object"}
    options: dict[str, Any] = {"disable_any_whitespace": True}
    compact = await grammar_for(
        client, client.backend, structured_outputs={"json": schema, **options}
    )
    assert takes(compact, '{"a":1}')
    assert not takes(compact, '{"a": 1}')
    wide = {"json": schema, "whitespace_pattern": "[ ]{0,3}"}
    assert takes(await grammar_for(client, client.backend, structured_outputs=wide), '{   "a":  1}')


FORCED = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}


async def test_a_forced_call_and_a_constraint_exclude_each_other(config: AppConfig) -> None:
    parts = AppParts(config, {"m": FakeBackend(tool_call_format="hermes")})
    async with client_of(build_app(parts)) as client:
        for field, value in (("structured_outputs", {"choice": ["a"]}), ("guided_regex", "a")):
            param, message = await refusal(client, **{field: value}, **FORCED)
            assert param == field
            assert "tool_choice" in message


async def test_a_constraint_and_tools_allow_either(config: AppConfig) -> None:
    backend = FakeBackend(tool_call_format="hermes")
    async with client_of(build_app(AppParts(config, {"m": backend}))) as client:
        for outputs in ({"choice": ["yes", "no"]}, {"structural_tag": WEATHER}):
            grammar = await grammar_for(
                client, backend, structured_outputs=outputs, tools=FORCED["tools"]
            )
            assert takes(grammar, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
            assert takes(grammar, "yes") or takes(grammar, CALL)
            assert not takes(grammar, "<function=other>")


async def test_the_setting_opens_objects(backend: FakeBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    texts = {}
    for closes in (True, False):
        config = AppConfig.model_validate(
            {
                "models": [{"id": "m", "source": "nowhere"}],
                "structured_outputs": {"closed_objects": closes},
            }
        )
        async with client_of(build_app(AppParts(config, {"m": backend}))) as client:
            open_too = {"json": schema, "disable_additional_properties": True}
            closed = await grammar_for(client, backend, structured_outputs=open_too)
            assert not takes(closed, '{"a": 1, "b": 2}')
            grammar = await grammar_for(client, backend, guided_json=schema)
        texts[closes] = takes(grammar, '{"a": 1, "b": 2}')
    assert texts == {True: False, False: True}


RULE_NAMES = ["".join(letters) for letters in islice(product(ascii_lowercase, repeat=3), 5_800)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value"),
    [
        (
            "grammar",
            "start: A\nA: " + " & ".join(f"/(?s:.*)a.{{{i}}}b(?s:.*)/" for i in range(1, 40)),
        ),
        (
            "grammar",
            # Translating takes time by the square of their number, so short names take the most.
            f"root::={RULE_NAMES[0]}\n"
            + "\n".join(f"{a}::={b}" for a, b in pairwise(RULE_NAMES))
            + f'\n{RULE_NAMES[-1]}::="a"',
        ),
        ("json", {"allOf": [{"type": "integer", "multipleOf": m} for m in (97, 89, 83, 79)]}),
    ],
    ids=["a large product", "a chain in GBNF", "multiples"],
)
async def test_what_compiles_too_long_is_refused_with_the_limit_s_name(
    client: Client, field: str, value: Any
) -> None:
    param, message = await refusal(client, structured_outputs={field: value})
    assert param == f"structured_outputs.{field}"
    assert "limits.max_schema_compile_s" in message
    assert not client.backend.requests
    assert (await client.post(CHAT, json=HI)).status_code == 200


@pytest.mark.parametrize(
    "regex", ["((a{1000}){1000}){1000}", "b{40}((a{1000}){1000}){1000}", r"(\p{L}{1,500}){1,500}"]
)
async def test_an_endless_repetition_costs_little_at_each_byte(client: Client, regex: str) -> None:
    grammar = await grammar_for(client, client.backend, structured_outputs={"regex": regex})
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=parser_limits(grammar))
    began_s = time.process_time()
    for byte in b"b" * 40 + b"a" * 100:
        matcher.compute_bitmask()
        matcher.consume_token(byte)
        if matcher.is_error():
            break
    assert time.process_time() - began_s < MAX_COST_S


ANY_TEXT = {"type": "structural_tag", "format": {"type": "any_text"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {}, "whitespace_pattern": " " * 65},
        {"json": " " * 63 + "{}"},
        {"structural_tag": " " * 65},
    ],
    ids=["white space", "text of a schema", "text of a tag"],
)
def test_a_text_is_measured_before_it_is_read(fields: dict[str, Any]) -> None:
    settings = GrammarSettings(LimitsConfig(max_schema_bytes=64))
    with pytest.raises(InvalidRequestError, match=r"larger than 64 bytes.*max_schema_bytes"):
        StructuredOutputs.model_validate(fields).to_grammar(settings)


async def test_the_document_describes_the_fields(client: Client) -> None:
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    properties = schemas["ChatRequest"]["properties"]
    assert "enum" not in properties["guided_json"], "no longer among the fields not supported"
    one_of = schemas["StructuredOutputs"]["allOf"][-1]["oneOf"]
    assert {name for rule in one_of for name in rule["required"]} == {
        "json", "regex", "choice", "grammar", "json_object", "structural_tag",
    }  # fmt: skip


def _maybe(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([None, *values])


CONSTRAINTS = st.fixed_dictionaries(
    {},
    optional={
        "json": _maybe({}, {"type": "object"}, "{}", ""),
        "regex": _maybe("a", ""),
        "choice": _maybe(["a"], [], [""]),
        "grammar": _maybe('start: "a"', ""),
        "json_object": _maybe(True, False),
        "structural_tag": _maybe("x", ANY_TEXT, {"type": "structural_tag"}),
        "whitespace_pattern": _maybe(" ", ""),
        "disable_any_whitespace": _maybe(True, False),
        "disable_additional_properties": _maybe(True, False),
    },
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "structured_outputs": st.one_of(st.none(), CONSTRAINTS),
        "guided_json": _maybe({}, {"type": "object"}, "{}", ""),
        "guided_regex": _maybe("a", ""),
        "guided_choice": _maybe(["a"], []),
        "guided_whitespace_pattern": _maybe(" "),
        "guided_decoding_backend": _maybe("xgrammar", 1),
        "structural_tag": _maybe("x"),
        "response_format": _maybe({"type": "text"}, ANY_TEXT, {**ANY_TEXT, "triggers": ["a"]}),
    },
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(FIELDS)
def test_the_document_and_the_check_agree_on_the_fields(fields: dict[str, Any]) -> None:
    body = {**PROMPT, **fields}
    try:
        CompletionRequest.model_validate(body)
    except ValidationError:
        is_accepted = False
    else:
        is_accepted = True
    assert DOCUMENT.is_valid(body) is is_accepted
