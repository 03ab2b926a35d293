"""`response_format`: the form that a client wants for the text, and the grammar that enforces it.

Source: https://platform.openai.com/docs/guides/structured-outputs
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from serve_app.api.body.strict_body import StrictBody
from serve_app.api.structured.answer_grammar import AnswerGrammar, GrammarSettings
from serve_app.api.structured.json_schema_grammar import (
    ANY_OBJECT,
    LENIENT,
    STRICT,
    json_schema_grammar,
)
from serve_app.api.structured.structural_tag import StructuralTag
from serve_app.api.structured.structural_tag_grammar import structural_tag_grammar

FIELD = "response_format"


class TextFormat(StrictBody):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictBody):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(StrictBody):
    """A JSON schema with a name."""

    name: str = Field(
        min_length=1, max_length=64, description="Accepted, but the model does not see it."
    )
    description: str | None = Field(
        default=None, description="Accepted, but the model does not see it."
    )
    schema_: dict[str, Any] = Field(
        alias="schema", description="The JSON schema by which the text is valid."
    )
    strict: bool | None = Field(
        default=None,
        description="True: a schema with a keyword or value that can't be enforced is "
        "refused. Otherwise these are left out, and the header X-Raystream-Warning names them. The "
        "rest of the schema is always enforced.",
    )


class JsonSchemaFormat(StrictBody):
    """JSON that is valid by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTag, Field(discriminator="type")
]


def to_grammar(
    format: ResponseFormat | NamedSchema, settings: GrammarSettings, param: str = FIELD
) -> AnswerGrammar | None:
    """Return the grammar; None allows any text. Call it in a `schema_executor`.

    Args:
        format: The form of the text.
        settings: The bounds on schemas.
        param: The request's field that holds it.

    Raises:
        InvalidRequestError: The schema is too large or can't be honoured.
    """
    match format:
        case TextFormat():
            return None
        case JsonObjectFormat():
            return json_schema_grammar(ANY_OBJECT, settings, param)
        case JsonSchemaFormat():
            return to_grammar(format.json_schema, settings, param)
        case NamedSchema():
            style = STRICT if format.strict else LENIENT
            return json_schema_grammar(format.schema_, settings, param, style)
        case StructuralTag():
            return structural_tag_grammar(format, settings, param)
