"""`make table`: writes the tables of docs/configuration.md from the models of the configuration.

A key's effect is the docstring below its field. A test fails if the document's tables differ.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel

from deployments.contract.model_spec import ModelConfig
from deployments.contract.strict_model import StrictModel
from deployments.contract.vllm_args import VllmArgs
from serve_app.commands.check.check import BatchingConfig, LoadPolicyConfig
from serve_app.commands.check.turns import TurnPolicyConfig
from serve_app.config import (
    ApiKey,
    AppConfig,
    AuthConfig,
    CorsConfig,
    JobsConfig,
    LimitsConfig,
    StructuredOutputsConfig,
    TracingConfig,
)
from tests.made_table import MadeTable

PAGE: Final = "docs/configuration.md"
VLLM_PAGE: Final = "docs/vllm.md"

HEADER = "| key | values | default | unit | effect |\n| --- | --- | --- | --- | --- |\n"

UNITS: Final[Mapping[str, str]] = {
    "_s": "seconds",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_model_len": "tokens",
    "_pixels": "pixels",
    "_gpus": "GPUs",
    "_share": "GPUs",
    "_cpus": "cores",
    "_threads": "threads",
    "_seqs": "sequences",
    "_requests": "requests",
    "_per_minute": "per minute",
}
"""By the end of a key's name."""


def rows(model: type[BaseModel]) -> str:
    """Return a line for each key of a section."""
    schema = model.model_json_schema()
    required = schema.get("required", ())
    return HEADER + "".join(
        f"| `{key}` | {_values(field, schema)} | {_default(key, field, required)} "
        f"| {_unit(key, field)} | {_effect(model, key)} |\n"
        for key, field in schema["properties"].items()
    )


def refused_rows(model: type[StrictModel]) -> str:
    """Return a line for each reason for which a section refuses keys of another program."""
    keys: dict[str, list[str]] = {}
    for key, reason in model.refused_keys.items():
        keys.setdefault(reason, []).append(f"`{key}`")
    lines = (f"| {reason} | {', '.join(refused)} |\n" for reason, refused in keys.items())
    return f"| why | keys |\n| --- | --- |\n{''.join(lines)}"


def _unit(key: str, field: Mapping[str, Any]) -> str:
    return (
        ""
        if field.get("type") == "boolean"
        else next((unit for end, unit in UNITS.items() if key.endswith(end)), "")
    )


def _effect(model: type[BaseModel], key: str) -> str:
    """Return a key's docstring, which its JSON schema lacks if it equals that of the section."""
    description = model.model_fields[key].description
    if description is None:
        raise ValueError(f"the key {key!r} has no docstring")
    return " ".join(description.split()).replace("|", r"\|")


def _default(key: str, field: Mapping[str, Any], required: list[str]) -> str:
    if key in required:
        return "required"
    value = field["default"]
    if isinstance(value, dict):
        return "its own"
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    named = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return named[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _values(field: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    return ", ".join(dict.fromkeys(_kinds(field, schema)))


def _kinds(field: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a field takes: its words, `null`, or its type with the range."""
    if "$ref" in field:
        yield from _kinds(schema["$defs"][field["$ref"].rpartition("/")[2]], schema)
    elif "anyOf" in field:
        for kind in field["anyOf"]:
            yield from _kinds(kind, schema)
    elif "enum" in field:
        yield from (f"`{word}`" for word in field["enum"])
    elif "const" in field:
        yield f"`{field['const']}`"
    elif field["type"] == "array":
        yield "a list"
    else:
        yield KINDS[field["type"]](field)


def _range(field: Mapping[str, Any]) -> str:
    low, above, high = (field.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    if high is not None:
        low_end = f"above {_yaml(above)}" if low is None else _yaml(low)
        return f"{low_end} to {_yaml(high)}"
    if above is not None:
        return f"above {_yaml(above)}"
    return "a number" if low is None else f"{_yaml(low)} or more"


KINDS: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
    "boolean": lambda _: "`true`, `false`",
    "integer": _range,
    "null": lambda _: "`null`",
    "number": _range,
    "object": lambda _: "a section",
    "string": lambda _: "text",
}
"""Returns what a field of a JSON type takes."""


TABLES: Final = (
    *(
        MadeTable(PAGE, f"the keys of {name}", make)
        for name, make in {
            "args": lambda: rows(AppConfig),
            "models": lambda: rows(ModelConfig),
            "limits": lambda: rows(LimitsConfig),
            "structured_outputs": lambda: rows(StructuredOutputsConfig),
            "auth": lambda: rows(AuthConfig),
            "the keys file": lambda: rows(ApiKey),
            "cors": lambda: rows(CorsConfig),
            "tracing": lambda: rows(TracingConfig),
            "jobs": lambda: rows(JobsConfig),
            "user_config": lambda: rows(BatchingConfig),
            "policy_kwargs": lambda: rows(LoadPolicyConfig),
            "TurnPolicy": lambda: rows(TurnPolicyConfig),
        }.items()
    ),
    MadeTable(VLLM_PAGE, "the keys of engine_args", lambda: rows(VllmArgs)),
    MadeTable(VLLM_PAGE, "the refused keys of engine_args", lambda: refused_rows(VllmArgs)),
)

if __name__ == "__main__":
    for table in TABLES:
        table.write()
