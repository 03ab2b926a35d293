"""`make table`: writes docs/api.md's routes, types and errors from OpenAPI and the error tree.

A test fails if the document differs.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import deployments.contract.errors
from deployments.contract.errors import RaystreamError
from serve_app.config import AppConfig
from serve_app.http.route_docs import ERROR_CAUSES
from serve_app.ingress import AppParts, build_app
from tests.made_table import MadeTable
from tests.serve_app.fake_pooler import FakeClassifier, FakeEmbedder
from tests.serve_app.fakes import FakeBackend, FakeClock

PAGE: Final = "docs/api.md"
MODELS: Final = {"pydoc-chat": "generate", "pydoc-detector": "classify", "pydoc-search": "embed"}
UNSUPPORTED: Final = "Not supported: "
"""How the description of a field begins that is accepted only without effect."""
MAX_NUM_VALUES: Final = 12
"""Longer lists of values are numbers in a row; only the first and the last are shown."""

Schema = Mapping[str, Any]


@cache
def openapi() -> dict[str, Any]:
    """Return the document of a server with the embedded models."""
    entries = [{"id": id_, "source": "models", "task": task} for id_, task in MODELS.items()]
    parts = AppParts(
        AppConfig.model_validate({"models": entries}),
        {"pydoc-chat": FakeBackend()},
        clock=FakeClock(),
        classifiers={"pydoc-detector": FakeClassifier()},
        embedders={"pydoc-search": FakeEmbedder()},
    )
    return build_app(parts).openapi()


@dataclass(frozen=True)
class Operation:
    """A route with a method."""

    method: str  # in capitals
    path: str  # with names in braces
    told: Schema  # what OpenAPI says about it

    @property
    def body(self) -> str | None:
        """The name of the body's schema."""
        content = self.told.get("requestBody", {}).get("content", {})
        found = content.get("application/json")
        return None if found is None else _name(found["schema"])

    @property
    def answer(self) -> str | None:
        """The name of the answer's schema, if the answer is JSON."""
        content = self.told["responses"]["200"].get("content", {})
        schema = content.get("application/json", {}).get("schema", {})
        return _name(schema) if "$ref" in schema else None

    @property
    def chunk(self) -> str | None:
        """The name of the schema of a stream's events, if the answer may be a stream."""
        content = self.told["responses"]["200"].get("content", {})
        if "text/event-stream" not in content:
            return None
        data: Schema = content["text/event-stream"]["schema"]["properties"]["data"]
        return _name(data["anyOf"][-1]["contentSchema"]["anyOf"][0])


def operations() -> list[Operation]:
    """Return all operations in the document's order."""
    return [
        Operation(method.upper(), path, told)
        for path, methods in openapi()["paths"].items()
        for method, told in methods.items()
    ]


def routes() -> str:
    """Return a line for each route, and a section for each body."""
    lines = "".join(
        f"| `{each.method} {each.path}` | {_one_line(each.told['summary'])} "
        f"| {_link(each.body) if each.body else ''} | {_answers(each)} |\n"
        for each in operations()
    )
    return "| route | what it does | body | answer |\n| --- | --- | --- | --- |\n" + lines


def bodies() -> str:
    """Return a section for each body, with a line for each field."""
    by_body: dict[str, list[Operation]] = {}
    for each in operations():
        if each.body:
            by_body.setdefault(each.body, []).append(each)
    return "\n".join(_body(name, those) for name, those in by_body.items())


def types() -> str:
    """Return a line for each type that bodies, answers and events are made of."""
    own = {each.body for each in operations()}
    roots = [name for each in operations() for name in (each.body, each.answer, each.chunk) if name]
    return "".join(_type(name) for name in sorted(_reachable(roots) - own))


def errors() -> str:
    """Return the statuses, and a line for each code."""
    statuses = "".join(f"| {status} | {cause} |\n" for status, cause in ERROR_CAUSES.items())
    codes = {each.code: each for each in _error_classes() if each.code}
    rows = "".join(
        f"| `{code}` | {each.status} | {_meaning(each)} |\n" for code, each in sorted(codes.items())
    )
    return (
        f"| status | what it means |\n| --- | --- |\n{statuses}\n"
        f"| code | status | what it means |\n| --- | --- | --- |\n{rows}"
    )


def _error_classes() -> Iterator[type[RaystreamError]]:
    """Yield the classes from the special to the general, so that the general one has its code."""
    classes = [
        each
        for each in vars(deployments.contract.errors).values()
        if isinstance(each, type) and issubclass(each, RaystreamError)
    ]
    return reversed(classes)


def _meaning(error: type[RaystreamError]) -> str:
    """Return the first sentence of an error's docstring; that of all errors says too little."""
    if error is RaystreamError:
        return ERROR_CAUSES[error.status]
    return _one_line(inspect.getdoc(error) or "", until=".") + "."


def _answers(operation: Operation) -> str:
    """Return what an operation answers with: JSON, events, or another type of content."""
    if operation.answer or operation.chunk:
        stream = f"events of {_link(operation.chunk)}" if operation.chunk else None
        whole = _link(operation.answer) if operation.answer else None
        return " or ".join(filter(None, (whole, stream)))
    content = operation.told["responses"]["200"].get("content", {})
    return ", ".join(f"`{kind.partition(';')[0]}`" for kind in content)


def _body(name: str, those: Sequence[Operation]) -> str:
    title = ", ".join(f"`{each.path}`" for each in those)
    schema = _schemas()[name]
    fields, refused = _fields(schema)
    without_effect = ", ".join(f"`{key}`" for key in refused)
    rest = f"\nRefused, except with a value that has no effect: {without_effect}.\n"
    return (
        f"### {name}\n\nThe body of {title}. {_one_line(those[0].told.get('description', ''))}\n\n"
        "| field | type | default | what it is |\n| --- | --- | --- | --- |\n"
        + "".join(_field(key, schema, field) for key, field in fields.items())
        + (rest if refused else "")
    )  # fmt: skip


def _field(key: str, schema: Schema, field: Schema) -> str:
    value = field.get("default")
    default = "" if value is None else f"`{_json(value)}`"
    needed = "required" if key in schema.get("required", ()) else default
    kind = "a model's id" if key == "model" else _kind(field)
    return f"| `{key}` | {kind} | {needed} | {_one_line(field.get('description', ''))} |\n"


def _type(name: str) -> str:
    schema = _schemas()[name]
    anchor, told = f'<a id="{name.lower()}"></a>', _one_line(schema.get("description", ""))
    if "properties" not in schema:
        return f"- {anchor}**{name}**: {_kind(schema)}. {told}\n"
    fields, _ = _fields(schema)
    if not fields:
        return f"- {anchor}**{name}**: an empty object. {told}\n"
    listed = "; ".join(f"`{key}` {_kind(field)}" for key, field in fields.items())
    return f"- {anchor}**{name}**: {listed}. {told}\n"


def _fields(schema: Schema) -> tuple[dict[str, Schema], list[str]]:
    """Return the fields, and the names of those that are accepted only without effect."""
    properties: dict[str, Schema] = schema.get("properties", {})
    refused = [
        key
        for key, field in properties.items()
        if field.get("description", "").startswith(UNSUPPORTED)
    ]
    return {key: field for key, field in properties.items() if key not in refused}, refused


def _reachable(names: Sequence[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _refs(_schemas()[name])
    return found


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if "$ref" in value:
            yield _name(value)
        for key, part in value.items():
            unsupported = isinstance(part, Mapping) and str(part.get("description", "")).startswith(
                UNSUPPORTED
            )
            if key not in ("discriminator", "examples") and not unsupported:
                yield from _refs(part)
    elif isinstance(value, list):
        for part in value:
            yield from _refs(part)


def _kind(field: Schema) -> str:
    """Return the type of a value in words."""
    if "$ref" in field:
        return _link(_name(field))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in field:
            kinds = [_kind(each) for each in field[key] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds)) + _bounds(field)
    if "enum" in field:
        values = [value for value in field["enum"] if value is not None]
        if len(values) > MAX_NUM_VALUES:
            return f"`{_json(values[0])}` to `{_json(values[-1])}`"
        return ", ".join(f"`{_json(value)}`" for value in values)
    if "const" in field:
        return f"`{_json(field['const'])}`"
    return _plain(field)


def _plain(field: Schema) -> str:
    kind = field.get("type", "any value")
    if isinstance(kind, list):
        return " or ".join(part for part in kind if part != "null")
    if kind == "array":
        return f"list of {_kind(field['items'])}" if field.get("items") else "list"
    return f"{kind}{_bounds(field)}"


def _bounds(field: Schema) -> str:
    low, above = field.get("minimum"), field.get("exclusiveMinimum")
    high = field.get("maximum")
    if high is not None and abs(high) >= 2**31 - 1:
        high = None
    lower = f"{low:g}" if low is not None else f"above {above:g}" if above is not None else ""
    if high is not None:
        return f", {lower} to {high:g}" if lower else f", at most {high:g}"
    if low is not None and low <= -(2**31):
        return ""
    return f", {lower} or more" if low is not None else f", {lower}" if lower else ""


def _json(value: Any) -> str:
    named = {None: "null", True: "true", False: "false"}
    return named[value] if value is None or isinstance(value, bool) else str(value)


def _schemas() -> dict[str, Schema]:
    schemas: dict[str, Schema] = openapi()["components"]["schemas"]
    return schemas


def _name(ref: Schema) -> str:
    return str(ref["$ref"]).rpartition("/")[2]


def _link(name: str | None) -> str:
    return f"[{name}](#{str(name).lower()})"


def _one_line(text: str, until: str | None = None) -> str:
    line = " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")
    return line.partition(until)[0] if until else line


TABLES: Final = (
    MadeTable(PAGE, "routes", routes),
    MadeTable(PAGE, "bodies", bodies),
    MadeTable(PAGE, "types", types),
    MadeTable(PAGE, "errors", errors),
)

if __name__ == "__main__":
    for table in TABLES:
        table.write()
