"""`raystream schema`: the JSON schema of a whole configuration file, for editors.

It is made from the models with which `raystream check` checks a file: Ray's for Serve's sections,
and ours for `args:`, `user_config` and `policy_kwargs`. With it an editor completes keys, shows
what each does, and marks unknown keys and wrong values. What depends on several values, on files or
on the machine, only `raystream check` finds.

Draft 7, which the language server for YAML reads in all of its versions.

Source: https://json-schema.org/draft-07/json-schema-validation,
https://github.com/redhat-developer/yaml-language-server#using-inlined-schema
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from ray.serve._private.utils import DEFAULT
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from deployments.contract.model_spec import GENERATION_KEYS, ModelConfig
from serve_app.commands.check.check import (
    MAPPING_KEYS,
    OWN_NAMES,
    BatchingConfig,
    LoadPolicyConfig,
)
from serve_app.commands.check.compose import BUILDER
from serve_app.commands.check.sleep_check import LOAD_POLICY
from serve_app.config import AppConfig

Schema = dict[str, Any]

DRAFT: Final = "http://json-schema.org/draft-07/schema#"
BESIDE: Final = "raystream.schema.json"
"""The name under which `new-config` writes the schema beside a file."""

TITLE: Final = "serve_config.yaml"
"""The title of the schema."""

OURS: Final = "raystream."
"""How the names of our definitions begin: Ray has a `TracingConfig`, too."""


def write_new(file: Path, text: str) -> None:
    """Write a new file, whose first line names the schema to editors, and the schema beside it.

    Neither is written over another, but a schema of another version of raystream is replaced.

    Raises:
        OSError: One of both can't be written, and then neither is.
    """
    beside, schema = file.with_name(BESIDE), schema_text()
    before = beside.read_text(encoding="utf-8", errors="replace") if beside.is_file() else ""
    texts = {file: f"# yaml-language-server: $schema={BESIDE}\n{text}", beside: schema}
    if before == schema:
        del texts[beside]
    made: list[Path] = []
    try:
        for path, content in texts.items():
            is_older = path == beside and _is_ours(before)
            with path.open("w" if is_older else "x", encoding="utf-8") as new:
                if not is_older:
                    made.append(path)
                new.write(content)
    except OSError:
        for path in made:
            path.unlink()
        raise


def _is_ours(text: str) -> bool:
    """Return whether a text is the schema that some version has written."""
    try:
        schema = json.loads(text)
    except ValueError:
        return False
    return isinstance(schema, dict) and schema.get("title") == TITLE


def schema_text() -> str:
    """Return the schema as it is printed."""
    return json.dumps(file_schema(), indent=2) + "\n"


def file_schema() -> Schema:
    """Return the schema of a file; it refuses nothing that `raystream check` accepts."""
    schema = ServeDeploySchema.model_json_schema()
    _close(schema)
    definitions: Schema = schema.pop("$defs")
    _drop_stand_in_defaults(definitions)
    for model in (AppConfig, BatchingConfig, LoadPolicyConfig):
        definitions |= _ours(model)
    _add_ours(schema, definitions)
    _refuse_generation_keys(definitions[OURS + ModelConfig.__name__])
    whole = {
        "$schema": DRAFT,
        **schema,
        "title": TITLE,
        "description": "What raystream serves: Serve's sections, and raystream's own under `args:`",
        "$defs": definitions,
    }
    _flatten_descriptions(whole)
    return whole


def _ours(model: type[BaseModel]) -> Iterator[tuple[str, Schema]]:
    """Yield the definitions of one of our sections and its parts, by their names in the schema."""
    schema = model.model_json_schema(ref_template=f"#/$defs/{OURS}{{model}}")
    parts: Schema = schema.pop("$defs", {})
    for name, part in {**parts, model.__name__: schema}.items():
        yield OURS + name, part


def _ref(model: type[BaseModel]) -> Schema:
    return {"$ref": f"#/$defs/{OURS}{model.__name__}"}


def _drop_stand_in_defaults(definitions: Schema) -> None:
    """Drop defaults that only mean "not given": Ray's schema shows them as 1."""
    for model in (DeploymentSchema, ServeApplicationSchema):
        for key, field in model.model_fields.items():
            if isinstance(field.default, DEFAULT):
                definitions[model.__name__]["properties"][key].pop("default", None)


def _close(schema: Schema) -> None:
    """Let sections of Ray's have no other keys than those that Ray reads."""
    for section in _parts(schema):
        if "properties" in section:
            section["additionalProperties"] = False
        choices = section.get("anyOf", ())
        if any("$ref" in each for each in choices):
            # Any mapping would pass as another choice.
            section["anyOf"] = [e for e in choices if e.get("additionalProperties") is not True]
        for key, field in section.get("properties", {}).items():
            for each in (field, *field.get("anyOf", ())):
                if key in MAPPING_KEYS and each.get("type") == "object":
                    each["properties"] = {name: {} for name in MAPPING_KEYS[key]}
                    each["additionalProperties"] = False


def _parts(node: Any) -> Iterator[Schema]:
    """Yield every mapping within a schema, from the top down."""
    if isinstance(node, dict):
        yield node
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _parts(each)


def _add_ours(schema: Schema, definitions: Schema) -> None:
    """Describe what Ray passes on unread: `args:`, `user_config` and `policy_kwargs`."""
    builder = _has("import_path", {"const": BUILDER})
    schema["properties"]["applications"]["contains"] = builder
    application = definitions[ServeApplicationSchema.__name__]
    application["properties"]["import_path"]["examples"] = [BUILDER]
    application["if"] = builder
    application["then"] = {
        "required": ["args"],
        "properties": {
            "args": _ref(AppConfig),
            "deployments": {
                "items": {
                    "if": _has("name", {"enum": list(OWN_NAMES)}),
                    "else": {
                        "properties": {
                            "user_config": {"anyOf": [_ref(BatchingConfig), {"type": "null"}]}
                        }
                    },
                }
            },
        },
    }
    policy = definitions["AutoscalingPolicy"]
    policy["properties"]["policy_function"]["examples"] = [LOAD_POLICY]
    policy["if"] = _has("policy_function", {"const": LOAD_POLICY})
    policy["then"] = {"properties": {"policy_kwargs": _ref(LoadPolicyConfig)}}


def _refuse_generation_keys(model: Schema) -> None:
    """Refuse the keys of a model's entry that only one that generates has."""
    model["if"] = _has("task", {"enum": ["classify", "embed"]})
    model["then"] = {"properties": dict.fromkeys(GENERATION_KEYS, False)}


def _has(key: str, value: Schema) -> Schema:
    return {"required": [key], "properties": {key: value}}


def _flatten_descriptions(schema: Schema) -> None:
    """Write each description as one paragraph: docstrings are wrapped."""
    for part in _parts(schema):
        if isinstance(text := part.get("description"), str):
            part["description"] = " ".join(text.split())
