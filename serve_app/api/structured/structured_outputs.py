"""`structured_outputs`, vLLM's object with one constraint on the text, and the older fields for it.

Source: https://docs.vllm.ai/en/latest/features/structured_outputs/
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from deployments.contract.errors import InvalidRequestError
from serve_app.api.body.strict_body import NOTHING, StrictBody
from serve_app.api.structured.answer_grammar import (
    AnswerGrammar,
    GrammarSettings,
    check_size,
    refusal,
)
from serve_app.api.structured.client_grammar import choice_grammar, regex_grammar, rules_grammar
from serve_app.api.structured.json_schema_grammar import (
    ANY_OBJECT,
    COMPACT,
    WHAT,
    JsonStyle,
    json_schema_grammar,
)
from serve_app.api.structured.structural_tag import StructuralTag
from serve_app.api.structured.structural_tag_grammar import WHAT as TAG
from serve_app.api.structured.structural_tag_grammar import structural_tag_grammar
from serve_app.http.json_route import decode_json
from serve_app.http.validation_refusal import refusal_of

FIELD: Final = "structured_outputs"
MAX_NUM_CHOICES: Final = 4096
MAX_JSON_DEPTH: Final = 256


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    return "object" if isinstance(value, dict | StructuralTag) else None


_BY_KIND: Final = Discriminator(
    _kind,
    custom_error_type="object_or_string",
    custom_error_message="must be an object or a string",
)

Written = Annotated[str, Field(min_length=1)]
Text = Annotated[Written, Tag("text")]
JsonSchema = Annotated[Annotated[dict[str, Any], Tag("object")] | Text, _BY_KIND]
OlderJsonSchema = Annotated[
    Annotated[dict[str, Any], Field(min_length=1), Tag("object")] | Text, _BY_KIND
]
TagOrText = Annotated[Annotated[StructuralTag, Tag("object")] | Text, _BY_KIND]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=MAX_NUM_CHOICES, fail_fast=True),
]

CONSTRAINTS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
WITH_JSON: Final = ("json", "json_object", "structural_tag")
"""The constraints whose text may be JSON."""
JSON_OPTIONS: Final = (
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
)

_JSON_RULE: Final[dict[str, Any]] = {
    "allOf": [
        {
            "anyOf": [
                {"properties": {name: {"enum": list(NOTHING)} for name in JSON_OPTIONS}},
                *(
                    {"properties": {name: {"not": {"type": "null"}}}, "required": [name]}
                    for name in WITH_JSON
                ),
            ]
        }
    ]
}
"""The rule of `StructuredOutputs._check_options` as a JSON schema."""


class StructuredOutputs(StrictBody):
    """One constraint on the text, in vLLM's form."""

    model_config = ConfigDict(json_schema_extra=_JSON_RULE)

    json_: JsonSchema | None = Field(
        default=None, alias="json", description="A JSON schema, as an object or as a text."
    )
    regex: Written | None = Field(
        default=None,
        description="A regular expression, in the syntax of Rust's regex crate, that the whole "
        "text matches.",
    )
    choice: Choices | None = Field(default=None, description="The text is one of these.")
    grammar: Written | None = Field(
        default=None,
        description="Rules in llguidance's dialect of Lark, or in GBNF, that the text follows.",
    )
    json_object: Literal[True] | None = Field(default=None, description="Any JSON object.")
    structural_tag: TagOrText | None = Field(
        default=None, description="A structural tag, as an object or as a text of JSON."
    )

    disable_any_whitespace: bool | None = Field(
        default=None, description="Write JSON without the spaces that it is allowed otherwise."
    )
    disable_additional_properties: bool | None = Field(
        default=None,
        description="True: objects that list properties have no others. Otherwise the server's "
        "setting decides.",
    )
    whitespace_pattern: Written | None = Field(
        default=None,
        description="The regular expression of what may stand where JSON allows white space.",
    )

    one_of: ClassVar[tuple[str, ...]] = CONSTRAINTS
    excludes: ClassVar[Mapping[str, str]] = {"disable_any_whitespace": "whitespace_pattern"}

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        given = next((name for name in JSON_OPTIONS if getattr(self, name)), None)
        if given is not None and all(self.wire_value(name) is None for name in WITH_JSON):
            raise PydanticCustomError(
                "invalid_combination",
                "{field} has no effect without json, json_object or structural_tag.",
                {"field": given},
            )
        return self

    def to_grammar(self, settings: GrammarSettings) -> AnswerGrammar:
        """Return the grammar. Call it in a `schema_executor`.

        Raises:
            InvalidRequestError: The constraint is too large or can't be honoured.
        """
        value, name = next(
            (self.wire_value(name), name)
            for name in CONSTRAINTS
            if self.wire_value(name) is not None
        )
        style = JsonStyle(
            white_space="" if self.disable_any_whitespace else self.whitespace_pattern or COMPACT,
            closes_objects=True if self.disable_additional_properties else None,
        )
        return constraint_grammar(name, value, settings, f"{FIELD}.{name}", style)


def constraint_grammar(
    name: str, value: Any, settings: GrammarSettings, param: str, style: JsonStyle
) -> AnswerGrammar:
    """Return the grammar of one constraint. Call it in a `schema_executor`.

    Args:
        name: One of `CONSTRAINTS`.
        value: Its value, as `StructuredOutputs` has validated it.
        settings: The bounds on its size, depth and compile time.
        param: The request's field that holds it.
        style: How JSON is written.

    Raises:
        InvalidRequestError: It is too large or can't be honoured.
    """
    match name:
        case "json":
            return json_schema_grammar(_schema(value, settings, param), settings, param, style)
        case "json_object":
            return json_schema_grammar(ANY_OBJECT, settings, param, style)
        case "regex":
            return regex_grammar(value, settings, param)
        case "choice":
            return choice_grammar(value, settings, param)
        case "grammar":
            return rules_grammar(value, settings, param)
        case _:
            return structural_tag_grammar(_tag(value, settings, param), settings, param, style)


def _schema(given: JsonSchema, settings: GrammarSettings, param: str) -> Mapping[str, Any]:
    return _decoded(given, settings, WHAT, param) if isinstance(given, str) else given


def _tag(given: StructuralTag | str, settings: GrammarSettings, param: str) -> StructuralTag:
    if not isinstance(given, str):
        return given
    tag = _decoded(given, settings, TAG, param)
    try:
        return StructuralTag.model_validate(tag)
    except ValidationError as error:
        raise refusal_of(error.errors(include_url=False), tag, param) from None


def _decoded(text: str, settings: GrammarSettings, what: str, param: str) -> dict[str, Any]:
    """Return the object that a JSON text holds.

    Raises:
        InvalidRequestError: It is too large, or holds none.
    """
    # First: while a text is decoded, no other thread runs, and a body has room for 32 MiB.
    check_size(text, settings, what, param)
    try:
        decoded = decode_json(text.encode(), MAX_JSON_DEPTH)
    except InvalidRequestError as error:
        why = error.message.replace("The body", "the text").replace("the body's", "the text's")
        raise refusal(why, what, param) from None
    if not isinstance(decoded, dict):
        raise refusal("it is not a JSON object", what, param)
    return decoded


class StructuredFields(StrictBody):
    """The fields that constrain the text: `structured_outputs`, and what vLLM had before it."""

    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="A constraint on the text, as in vLLM."
    )
    guided_json: OlderJsonSchema | None = Field(
        default=None, description="The older name of structured_outputs.json."
    )
    guided_regex: Written | None = Field(
        default=None, description="The older name of structured_outputs.regex."
    )
    guided_choice: Choices | None = Field(
        default=None, description="The older name of structured_outputs.choice."
    )
    guided_grammar: Written | None = Field(
        default=None, description="The older name of structured_outputs.grammar."
    )
    structural_tag: Written | None = Field(
        default=None, description="The older name of structured_outputs.structural_tag."
    )
    guided_whitespace_pattern: Written | None = Field(
        default=None,
        description="With guided_json: what may stand where JSON allows white space.",
    )
    guided_decoding_backend: str | None = Field(
        default=None, description="Accepted, but not read: llguidance follows all grammars."
    )

    needs: ClassVar[Mapping[str, str]] = {"guided_whitespace_pattern": "guided_json"}

    @property
    def constraining_field(self) -> str | None:
        """The field that constrains the text, if there is one; `response_format` does not count."""
        names = (FIELD, *OLDER_NAMES)
        return next((name for name in names if getattr(self, name) is not None), None)


OLDER_NAMES: Final[Mapping[str, str]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""vLLM's older fields, each with its name in `structured_outputs`."""


def structured_grammar(fields: StructuredFields, settings: GrammarSettings) -> AnswerGrammar | None:
    """Return the grammar that the fields ask for; None if they ask for none.

    Call it in a `schema_executor`.

    Raises:
        InvalidRequestError: A constraint is too large or can't be honoured.
    """
    if fields.structured_outputs is not None:
        return fields.structured_outputs.to_grammar(settings)
    for older, name in OLDER_NAMES.items():
        value = getattr(fields, older)
        if value is not None:
            style = JsonStyle(white_space=fields.guided_whitespace_pattern or COMPACT)
            return constraint_grammar(name, value, settings, older, style)
    return None
