r"""Schemas as generators of six languages write them, one property each: a row of a table.

A row has the property's schema, a value that it allows, and what a grammar leaves out of it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

Row = tuple[Mapping[str, Any], Any, str]
Root = Callable[[Mapping[str, Any]], dict[str, Any]]

DRAFT_7: Final = "http://json-schema.org/draft-07/schema#"
DRAFT_2020: Final = "https://json-schema.org/draft/2020-12/schema"
INT64: Final = {"minimum": -(2**63), "maximum": 2**63 - 1}
DOUBLE: Final = 1.7976931348623157e308
FLOAT: Final = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class Generated:
    """One schema."""

    name: str  # its generator, and its number among the generator's
    schema: dict[str, Any]  # the schema of an object with one property, `value`
    example: dict[str, Any]  # a valid object
    unheld: str  # what a grammar leaves out of it, as the warning names it


def generated() -> Iterator[Generated]:
    """Yield every schema of the tables."""
    for generator, (root, rows) in GENERATORS.items():
        for at, (schema, example, unheld) in enumerate(rows):
            yield Generated(f"{generator} {at}", root(schema), {"value": example}, unheld)


def text(pattern: str, example: str, unheld: str = "", **others: Any) -> Row:
    return {"type": "string", "pattern": pattern, **others}, example, unheld


def formats(*pairs: tuple[str, str, bool]) -> list[Row]:
    """Return strings of formats, each with an example and whether a grammar can hold the format."""
    return [
        ({"type": "string", "format": name}, example, "" if is_held else f"format {name}")
        for name, example, is_held in pairs
    ]


def sized(*sizes: int) -> list[Row]:
    """Return strings, lists and maps of at most so many characters, members and entries."""
    return [
        row
        for size in sizes
        for row in (
            ({"type": "string", "minLength": 0, "maxLength": size}, "text", ""),
            ({"type": "array", "items": {"type": "integer"}, "maxItems": size}, [1, 2], ""),
            ({"type": "object", "additionalProperties": True, "maxProperties": size}, {"a": 1}, ""),
        )
    ]


def listed(row: Row) -> list[Row]:
    """Return a row, and a list and a map of its schema."""
    schema, example, unheld = row
    return [
        row,
        ({"type": "array", "items": schema}, [example], unheld),
        ({"type": "object", "additionalProperties": schema}, {"key": example}, unheld),
    ]


def go_root(field: Mapping[str, Any]) -> dict[str, Any]:
    """As invopop/jsonschema: a reference to a definition, below an address."""
    struct = {"properties": {"value": field}, "additionalProperties": False, "type": "object"}
    struct["required"] = ["value"]
    address = "https://example.com/shop/order"
    return {
        "$schema": DRAFT_2020,
        "$id": address,
        "$ref": "#/$defs/Order",
        "$defs": {"Order": struct},
    }


def java_root(field: Mapping[str, Any]) -> dict[str, Any]:
    """As Jackson's module: identifiers of draft 3 or 4, and properties that are required."""
    properties = {"value": {**field, "required": True}}
    return {"type": "object", "id": "urn:jsonschema:com:shop:Order", "properties": properties}


def protobuf_root(field: Mapping[str, Any]) -> dict[str, Any]:
    """As buf's protoschema: names in two spellings, the second by a pattern."""
    struct = {
        "$schema": DRAFT_2020, "$id": "shop.v1.Order.schema.json", "title": "Order",
        "type": "object", "additionalProperties": False, "properties": {"value": field},
        "patternProperties": {"^(order_id)$": {"type": "string"}},
    }  # fmt: skip
    address = {"$schema": DRAFT_2020, "$id": "shop.v1.Order.schema.bundle.json"}
    return {**address, "$ref": "#/$defs/shop.v1.Order.schema.json",
            "$defs": {"shop.v1.Order.schema.json": struct}}  # fmt: skip


def zod_root(field: Mapping[str, Any]) -> dict[str, Any]:
    """As `z.toJSONSchema`."""
    return {"$schema": DRAFT_2020, "type": "object", "properties": {"value": field},
            "required": ["value"], "additionalProperties": False}  # fmt: skip


def pydantic_root(field: Mapping[str, Any]) -> dict[str, Any]:
    """As `model_json_schema`."""
    return {"properties": {"value": {"title": "Value", **field}}, "required": ["value"],
            "title": "Order", "type": "object"}  # fmt: skip


def serde_root(field: Mapping[str, Any]) -> dict[str, Any]:
    """As schemars 0.8."""
    return {"$schema": DRAFT_7, "title": "Order", "type": "object", "required": ["value"],
            "properties": {"value": field}, "definitions": {}}  # fmt: skip


def signed(bits: int, **others: Any) -> Row:
    most = 2 ** (bits - 1) - 1
    return {"type": "integer", "minimum": -most - 1, "maximum": most, **others}, -7, ""


def unsigned(bits: int, **others: Any) -> Row:
    most = 2**bits - 1
    schema = {"type": "integer", "minimum": 0, "maximum": most, **others}
    return schema, most, f"maximum {most}" if bits == 64 else ""


GO: Final[list[Row]] = [
    *(row for bits in (8, 16, 32, 64) for row in listed(signed(bits))),
    *(row for bits in (8, 16, 32, 64) for row in listed(unsigned(bits))),
    ({"type": "number", "minimum": -DOUBLE, "maximum": DOUBLE}, -1.5, ""),
    ({"type": "number", "minimum": 5e-324, "maximum": DOUBLE}, 0.5, ""),
    ({"type": "number", "exclusiveMinimum": 2.2250738585072014e-308}, 0.5, ""),
    ({"type": ["null", "array"], "items": {"type": "integer", "minimum": 0}}, None, ""),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}, [1, 2], ""),
    ({"type": "array", "items": True}, [1, "a"], ""),
    ({"type": "string", "contentEncoding": "base64"}, "AQ==", ""),
    ({"patternProperties": {"^[0-9]+$": {"type": "string"}}, "type": "object"}, {"12": "a"}, ""),
    ({"patternProperties": {".*": {"type": "integer"}}, "type": "object"}, {"a": 1}, ""),
    ({"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, ["a"], ""),
    ({"type": "integer", "enum": [0, 2**31, 2**53, 2**63 - 1]}, 2**63 - 1, ""),
    ({"type": "string", "minLength": None, "pattern": None, "enum": None}, "a", ""),
    *formats(("date-time", "2026-01-02T03:04:05Z", True), ("ipv4", "10.0.0.1", True),
             ("ipv6", "::1", True), ("uri", "https://example.com", True), ("byte", "AQ==", False),
             ("email", "a@example.com", True), ("hostname", "example.com", True)),
    *sized(2**31 - 1, 2**63 - 1),
    text(r"^[^[]{2}$", "ab"),
    text(r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?"
         r"(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$", "12Gi"),
    text(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", "a-b.c"),
    text(r"(?P<year>\d{4})-\pL\x{41}\z", "2026-éA"),
]  # fmt: skip

JAVA: Final[list[Row]] = [
    *(row for bits in (8, 16, 32, 64) for row in listed(signed(bits))),
    *(row for size in (2**31 - 1, 2**63 - 1) for row in sized(size)),
    ({"type": "any"}, [1, {"a": None}], ""),
    ({"type": ["any", "null"]}, "a", ""),
    ({"type": "integer", "format": "utc-millisec"}, 1767225600000, ""),
    ({"type": "number", "minimum": -DOUBLE}, 1e300, ""),
    ({"type": "number", "minimum": 4.9e-324, "exclusiveMinimum": True}, 0.25, ""),
    ({"type": "number", "minimum": 1.4e-45, "maximum": FLOAT}, 0.25, f"maximum {FLOAT}"),
    ({"type": "number", "minimum": -FLOAT, "maximum": FLOAT}, 1e-3,
     f"maximum {FLOAT}, minimum -{FLOAT}"),
    ({"type": "number", "minimum": 0, "maximum": 9999999999999999.99}, 12.5, ""),
    ({"type": "integer", "minimum": 10**30}, 10**31, f"minimum {10**30}"),
    ({"type": "integer", "maximum": 10**400}, 5, ""),
    ({"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 10,
      "exclusiveMaximum": True}, 9, ""),
    ({"type": "number", "multipleOf": 0.01}, 12.25, ""),
    ({"type": "number", "multipleOf": 1e-20}, 1.5, "multipleOf 1e-20"),
    ({"type": "integer", "multipleOf": 604800}, 1209600, "multipleOf 604800"),
    ({"type": "integer", "multipleOf": 1000000}, 3000000, ""),
    ({"type": "integer", "divisibleBy": 5}, 10, ""),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ["a"], "uniqueItems"),
    ({"type": "object", "id": "urn:jsonschema:com:shop:Node",
      "properties": {"next": {"type": "object", "$ref": "urn:jsonschema:com:shop:Node"}}},
     {"next": {"next": {}}}, ""),
    ({"type": "string", "enum": ["NEW", "PAID"]}, "PAID", ""),
    ({"oneOf": [{"type": "null", "title": "Not included"}, {"type": "string"}]}, None, ""),
    *formats(("date-time", "2026-01-02T03:04:05Z", True), ("date", "2026-01-02", True),
             ("uuid", "123e4567-e89b-42d3-a456-426614174000", True), ("uri", "a:b", True),
             ("duration", "PT1H", True), ("host-name", "a.b", False), ("regex", "a", False)),
    text(r"^(?=.*[A-Z])(?=.*\d).{8,}$", "Passw0rd", "look-around in patterns"),
    text(r"^\+?[0-9. ()-]{7,25}$", "+1 (555) 010"),
    text(r"\A\d{5}\Z", "12345"),
    text(r"^\p{Lu}\p{javaLowerCase}*$", "A", "pattern"),
    text(r"^a++$", "aa", "patterns that ECMA-262 does not allow"),
    text(r"(?i)^yes|no$", "YES, of course"),
]  # fmt: skip

_INT64_TEXT: Final = {"type": "string", "pattern": "^-?[0-9]{1,20}$"}
PROTOBUF: Final[list[Row]] = [
    *(row for bits in (32, 64) for row in listed(signed(bits, default=0))),
    *(row for bits in (32, 64) for row in listed(unsigned(bits, default=0))),
    *listed(({"type": "integer", "minimum": -(2**31), "exclusiveMaximum": 2**31}, 5, "")),
    *listed(({"type": "integer", "minimum": -(2**63), "exclusiveMaximum": 2**63}, 2**63 - 1, "")),
    *listed(({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**64}, 2**64 - 1,
             f"exclusiveMaximum {2**64}")),
    *listed(({"anyOf": [{"type": "integer", **INT64}, _INT64_TEXT]}, "-9223372036854775808", "")),
    *listed(({"anyOf": [{"type": "number", "minimum": -DOUBLE, "maximum": DOUBLE},
                        {"type": "string", "pattern": r"^-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?$"},
                        {"enum": ["NaN", "Infinity", "-Infinity"], "type": "string"}]}, "NaN", "")),
    *listed(({"anyOf": [{"type": "number", "minimum": -FLOAT, "maximum": FLOAT},
                        {"enum": ["NaN", "Infinity", "-Infinity"]}]}, 2.5,
             f"maximum {FLOAT}, minimum -{FLOAT}")),
    *listed(text(r"^[A-Za-z0-9+/]*={0,2}$", "AQ==")),
    *listed(text(r"^-?(?:0|[1-9][0-9]{0,11})(?:\.[0-9]{1,9})?s$", "1.5s")),
    *listed(({"enum": ["STATUS_NEW", "STATUS_PAID"], "type": "string", "title": "Status"},
             "STATUS_NEW", "")),
    ({"anyOf": [{"enum": ["STATUS_NEW"], "type": "string"}, {"type": "integer", **INT64}]}, 1, ""),
    ({"type": "object", "propertyNames": {"pattern": "^[0-9]+$"},
      "additionalProperties": {"type": "string"}}, {"1": "a"}, "propertyNames"),
    ({"type": "object", "additionalProperties": True, "properties": {"@type": {"type": "string"}}},
     {"@type": "a.b/C", "x": 1}, ""),
    *formats(("date-time", "2026-01-02T03:04:05Z", True), ("byte", "AQ==", False),
             ("uuid", "123e4567-e89b-42d3-a456-426614174000", True),
             ("int64", "12", False), ("duration", "PT1S", True)),
    *sized(2**32 - 1, 2**64 - 1),
]  # fmt: skip

_SAFE: Final = 2**53 - 1
ZOD: Final[list[Row]] = [
    *listed(({"type": "integer", "minimum": -_SAFE, "maximum": _SAFE}, -_SAFE, "")),
    *listed(({"type": "integer", "exclusiveMinimum": 0, "maximum": _SAFE}, 1, "")),
    *listed(signed(32)),
    *listed(({"type": "number", "minimum": -DOUBLE, "maximum": DOUBLE}, 1e100, "")),
    ({"type": "number", "minimum": -FLOAT, "maximum": FLOAT}, 1e-3,
     f"maximum {FLOAT}, minimum -{FLOAT}"),
    ({"type": "number", "multipleOf": 0.1}, 0.5, ""),
    ({"not": {}}, 1, "not"),
    ({}, {"a": 1}, ""),
    ({"type": "string", "const": "a"}, "a", ""),
    ({"const": 9007199254740993}, 9007199254740993, "const 9007199254740993"),
    ({"enum": ["a", "b"], "type": "string"}, "b", ""),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, None, ""),
    ({"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
                {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]}]},
     {"k": "b"}, ""),
    ({"allOf": [{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "number"}}, "required": ["b"]}]},
     {"a": "x", "b": 1}, ""),
    ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]}, ["a", 1], ""),
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
     {"a": 1}, "propertyNames"),
    ({"type": "array", "items": {"type": "string"}, "minItems": 1}, ["a"], ""),
    text(r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
         r"[A-Za-z]{2,}$", "a@example.com", "look-around in patterns", format="email"),
    text(r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-"
         r"[0-9a-fA-F]{12}|00000000-0000-0000-0000-000000000000)$",
         "123e4567-e89b-42d3-a456-426614174000", format="uuid"),
    text(r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|"
         r"\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|"
         r"(?:02)-(?:0[1-9]|1\d|2[0-8])))$", "2024-02-29", format="date"),
    text(r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$", "12:30", "format time",
         format="time"),
    text(r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?"
         r"S)?)?)$", "P1DT2H", "look-around in patterns", format="duration"),
    text(r"^(\p{Extended_Pictographic}|\p{Emoji_Component})+$", "😀", "format emoji",
         format="emoji"),
    text(r"^(?:(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|"
         r"1[0-9][0-9]|[1-9][0-9]|[0-9])$", "10.0.0.1", format="ipv4"),
    text(r"^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$", "AQ==",
         "format base64", format="base64", contentEncoding="base64"),
    text(r"^[A-Za-z0-9_-]*$", "a_-", "format base64url", format="base64url"),
    text(r"^\+(?:[0-9]){6,14}[0-9]$", "+15550100", "format e164", format="e164"),
    text(r"^[0-9a-z]+$", "a1", "format cuid2", format="cuid2"),
    text(r"^[0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{26}$", "0" * 26, "format ulid", format="ulid"),
    text(r"^[a-zA-Z0-9_-]{21}$", "a" * 21, "format nanoid", format="nanoid"),
    text(r"^abc.*", "abcd"),
    text(r"^[^a-z]*$", "ABC"),
    text(r"^[a[\]]$", "["),
    text(r"^[\b]\cA$", "\x08\x01"),
    text(r"^\ud83d\ude00[^]$", "😀\n"),
    text(r"^[\ud800-\udbff][\udc00-\udfff]$", "😀"),
    text(r"^(\w)\1$", "aa", "back-references in patterns"),
    text(r"\bword\b", "a word", "word boundaries in patterns"),
    text(r"^[a--c]$", "b", "patterns that ECMA-262 does not allow"),
    text(r"^[a&&b]$", "&"),
    text(r"^x{$", "x{"),
    *formats(("date-time", "2026-01-02T03:04:05Z", True), ("uri", "a:b", True),
             ("ipv6", "::1", True), ("cidrv4", "10.0.0.0/8", False), ("jwt", "a.b.c", False)),
]  # fmt: skip

PYDANTIC: Final[list[Row]] = [
    *listed(({"type": "integer"}, 10**40, "")),
    *listed(({"type": "integer", **INT64}, 2**63 - 1, "")),
    *listed(({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2**64}, 2**64 - 1,
             f"exclusiveMaximum {2**64}")),
    *listed(({"type": "number", "minimum": -DOUBLE, "maximum": DOUBLE}, 2.5, "")),
    *listed(({"anyOf": [{"type": "number"},
                        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
             "1.50", "look-around in patterns")),
    *listed(({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}, None, "")),
    *sized(2**31, 10**19),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ["a"], "uniqueItems"),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2,
      "maxItems": 2}, [1, "a"], ""),
    ({"enum": [1, "a", None, 2.5]}, 2.5, ""),
    ({"enum": [175928847299117063]}, 175928847299117063, "enum [175928847299117063]"),
    ({"enum": [2**64 - 1, 0], "type": "integer"}, 2**64 - 1, f"enum [{2**64 - 1}, 0]"),
    ({"const": -(2**63)}, -(2**63), f"const {-(2**63)}"),
    ({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
     {"a": 1}, ""),
    ({"type": "object", "patternProperties": {r"^(?!x)": {"type": "integer"}}}, {"a": 1},
     "look-around in patterns"),
    ({"type": "object", "additionalProperties": False,
      "patternProperties": {"^a": {"type": "integer"}, "b$": {"type": "integer"}}}, {"ab": 1},
     "patternProperties"),
    *formats(("date", "2026-01-02", True), ("time", "03:04:05Z", True), ("duration", "PT1S", True),
             ("date-time", "2026-01-02T03:04:05Z", True), ("binary", "a", False),
             ("uuid4", "a", False), ("uri", "a:b", True), ("path", "/a", False),
             ("password", "a", False), ("ipv4network", "10.0.0.0/8", False),
             ("json-string", "1", False)),
    text(r"(?i)^[a-z]+$", "ABC"),
    text(r"^(?P<major>\d+)\.(?P<minor>\d+)$", "1.2"),
    text(r"^(?P<quote>['\"])x(?P=quote)$", "'x'", "back-references in patterns"),
    text(r"(?x) a", "a", "patterns that ECMA-262 does not allow"),
    text(r"\A\S+\Z", "a"),
]  # fmt: skip

SERDE: Final[list[Row]] = [
    *(row for bits in (8, 16) for row in listed(unsigned(bits, format=f"uint{bits}"))),
    *listed(({"type": "integer", "format": "uint64", "minimum": 0.0}, 2**64 - 1, "")),
    *listed(({"type": "integer", "format": "uint64", "minimum": 1.0}, 1, "")),
    *listed(({"type": "integer", "format": "int64", "minimum": -9.223372036854775808e18,
              "maximum": 9.223372036854775807e18}, 2**63 - 1, "")),
    *listed(({"type": "integer", "format": "uint128", "minimum": 0.0,
              "maximum": 3.402823669209385e38}, 10**30,
             "maximum 3.402823669209385e+38")),
    *listed(({"type": "number", "format": "double"}, 1e-9, "")),
    *listed(({"type": ["integer", "null"], "format": "int64", **INT64}, None, "")),
    *listed(({"type": "string", "maxLength": 1, "minLength": 1}, "é", "")),
    *listed(({"type": "array", "items": [{"type": "integer"}, {"type": "string"}], "maxItems": 2,
              "minItems": 2}, [1, "a"], "")),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 32, "minItems": 32}, [0] * 32, ""),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 3.0, "minItems": 1.0}, [1], ""),
    ({"oneOf": [{"type": "string", "enum": ["A"]}, {"type": "object", "required": ["B"],
      "properties": {"B": {"type": "integer"}}, "additionalProperties": False}]}, {"B": 1}, ""),
    ({"type": "object", "required": ["nanos", "secs"],
      "properties": {"nanos": {"type": "integer", "format": "uint32", "minimum": 0.0},
                     "secs": {"type": "integer", "format": "uint64", "minimum": 0.0}}},
     {"nanos": 1, "secs": 2}, ""),
    ({"type": "integer", "format": "int32", "not": {"const": 0}}, 1, "not"),
    ({"type": "null"}, None, ""),
    ({}, [1], ""),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ["a"], "uniqueItems"),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False},
     {"a": 1}, ""),
    *formats(("date-time", "2026-01-02T03:04:05Z", True), ("partial-date-time", "a", False),
             ("uuid", "123e4567-e89b-42d3-a456-426614174000", True), ("ip", "::1", False),
             ("uri", "a:b", True)),
    *sized(2**63, 2**64 - 1),
    text(r"^[[:alpha:]]+$", ":]"),
    text(r"^\d{3}-[^\s/]{0,4294967295}$", "123-a"),
]  # fmt: skip

GENERATORS: Final[Mapping[str, tuple[Root, list[Row]]]] = {
    "Go": (go_root, GO),
    "Java": (java_root, JAVA),
    "protobuf": (protobuf_root, PROTOBUF),
    "zod": (zod_root, ZOD),
    "pydantic": (pydantic_root, PYDANTIC),
    "serde": (serde_root, SERDE),
}
