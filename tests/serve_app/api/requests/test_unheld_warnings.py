"""What a grammar can't hold is named in a header, or refused where the schema is strict."""

import datetime
import decimal
import enum
import ipaddress
import pathlib
import re
import uuid
from collections import deque
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest

from serve_app.api.requests.stream_opener import unheld_warnings
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.offenders import for_each
from tests.serve_app.api.structured.accepting import takes
from tests.serve_app.apps import Client, client_of
from tests.serve_app.fakes import FakeBackend

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
WARNING = "x-raystream-warning"


class Kind(enum.Enum):
    one = "one"
    two = 2


class Point(NamedTuple):
    x: int
    y: int


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    tricks: set[str] = set()


class Tree(pydantic.BaseModel):
    value: int
    children: list["Tree"] = []


HELD: dict[str, Any] = {
    "int": int,
    "bounded": Annotated[int, pydantic.Field(ge=1, multiple_of=5)],
    "float": float,
    "decimal": decimal.Decimal,
    "pattern": Annotated[str, pydantic.Field(pattern="^[a-z]+$")],
    "date": datetime.date,
    "datetime": datetime.datetime,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "uuid": uuid.UUID,
    "url": pydantic.HttpUrl,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "enum": Kind,
    "optional": int | None,
    "union": Annotated[Cat | Dog, pydantic.Field(discriminator="kind")] | None,
    "list": list[int],
    "tuple": tuple[int, str],
    "named tuple": Point,
    "deque": deque[int],
    "dict": dict[str, int],
    "tree": Tree,
    "any": Any,
    "json": pydantic.Json[int],
}
UNHELD: dict[str, tuple[Any, str]] = {
    "set": (set[int], "uniqueItems"),
    "frozenset": (frozenset[str], "uniqueItems"),
    "bytes": (bytes, "format binary"),
    "base64": (pydantic.Base64Bytes, "format base64"),
    "base64url": (pydantic.Base64UrlStr, "format base64url"),
    "Path": (pathlib.Path, "format path"),
    "FilePath": (pydantic.FilePath, "format file-path"),
    "SecretStr": (pydantic.SecretStr, "format password"),
    "UUID4": (pydantic.UUID4, "format uuid4"),
    "PostgresDsn": (pydantic.PostgresDsn, "format multi-host-uri"),
    "network": (ipaddress.IPv4Network, "format ipv4network"),
    "regex": (re.Pattern, "format regex"),
    "keys": (dict[Literal["a", "b"], int], "propertyNames"),
}
# As zod writes an e-mail address.
LOOK_AROUND = {"type": "string", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z]+\.com$"}


def schema_of(kind: Any) -> dict[str, Any]:
    return pydantic.create_model("Model", field=(kind, ...)).model_json_schema()


def wanted(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    named = {"name": "n", "schema": schema, **fields}
    return {**HI, "response_format": {"type": "json_schema", "json_schema": named}}


@pytest.mark.slow
@for_each(*HELD)
async def test_what_pydantic_writes_for_most_types_is_held_strictly(
    name: str, client: Client
) -> None:
    schema = schema_of(HELD[name])
    if name == "union":
        schema["$defs"]["Dog"]["properties"].pop("tricks")
    answer = await client.ask(CHAT, wanted(schema, strict=True))
    assert WARNING not in answer.headers


@pytest.mark.slow
@for_each(*UNHELD)
async def test_what_can_not_be_held_is_named_and_refused_only_if_strict(
    name: str, client: Client
) -> None:
    kind, word = UNHELD[name]
    answer = await client.ask(CHAT, wanted(schema_of(kind)))
    assert answer.headers[WARNING] == f"Not enforced in JSON schemas: {word}"
    refused = await client.ask(CHAT, wanted(schema_of(kind), strict=True), 400)
    message = refused.json()["error"]["message"]
    assert word.removeprefix("format ") in message
    assert "Without strict: true" in message
    assert WARNING not in refused.headers


async def test_look_around_is_left_out_of_a_pattern_unless_strict(client: Client) -> None:
    answer = await client.post(CHAT, json=wanted(LOOK_AROUND))
    assert "look-around in patterns" in answer.headers[WARNING]
    grammar = client.backend.requests[0].sampling.grammar or ""
    assert takes(grammar, '".x@y.com"'), "what the look-ahead forbids"
    assert not takes(grammar, '"x"'), "what the rest of the pattern forbids"
    refused = await client.post(CHAT, json=wanted(LOOK_AROUND, strict=True))
    assert "look-around" in refused.json()["error"]["message"]
    kept = await client.post(CHAT, json=wanted({"type": "string", "pattern": "^[(?=]$"}))
    assert WARNING not in kept.headers


async def test_a_stream_carries_the_header_too(client: Client) -> None:
    body = {**wanted(schema_of(set[int])), "stream": True}
    answer = await client.post(CHAT, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "uniqueItems" in answer.headers[WARNING]


async def test_other_requests_have_no_such_header(client: Client) -> None:
    await client.post(CHAT, json=wanted(schema_of(bytes)))
    assert WARNING not in (await client.post(CHAT, json=HI)).headers


@pytest.mark.parametrize("is_strict", [False, True])
async def test_a_required_tool_is_treated_alike(config: AppConfig, is_strict: bool) -> None:
    function = {"name": "f", "parameters": schema_of(set[int]), "strict": is_strict}
    body = {**HI, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    parts = AppParts(config, {"m": FakeBackend(tool_call_format="hermes")})
    async with client_of(build_app(parts)) as client:
        answer = await client.post(CHAT, json=body)
    assert answer.status_code == (400 if is_strict else 200)
    assert "uniqueItems" in (answer.text if is_strict else answer.headers[WARNING])


async def test_a_client_s_words_add_no_header(client: Client) -> None:
    hostile = {"type": "string", "format": "x\r\nSet-Cookie: a=b\r\n\r\n\u00e9" + "y" * 5_000}
    answer = await client.ask(CHAT, wanted({"properties": {"a": hostile}}))
    assert "set-cookie" not in answer.headers
    value = answer.headers[WARNING]
    assert value.isascii()
    assert value.isprintable()
    assert len(value) < 600


async def test_the_header_is_bounded_however_many_keywords_there_are(client: Client) -> None:
    many = {f"p{i}": {"type": "string", "format": f"format-{i:030}"} for i in range(100)}
    answer = await client.post(CHAT, json=wanted({"properties": many}))
    assert len(answer.headers[WARNING]) <= 512
    assert answer.headers[WARNING].endswith("...")


def test_warnings_are_told_in_a_client_s_words() -> None:
    (told,) = unheld_warnings(
        [
            'Unimplemented keys: ["contains", "if"]',
            "Unknown format: path",
            "Unknown format: path",
            "oneOf not fully supported, falling back to anyOf. This may cause errors.",
            "min/maxProperties only supported when all keys are required",
        ]
    )
    assert told == (
        "Not enforced in JSON schemas: contains, format path, if, "
        "minProperties and maxProperties, oneOf (read as anyOf)"
    )
    assert unheld_warnings([]) == ()
