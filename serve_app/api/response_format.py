"""`response_format`: what a client wants the text to be, and the grammar that makes it so.

Source: https://platform.openai.com/docs/guides/structured-outputs
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from serve_app.api.json_schema_grammar import ANY_OBJECT, json_schema_grammar
from serve_app.api.strict_body import StrictBody
from serve_app.config import LimitsConfig


class TextFormat(StrictBody):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictBody):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(StrictBody):
    """A JSON schema with a name."""

    name: str = Field(
        min_length=1, max_length=64, description="Bookkeeping: the model does not see it."
    )
    description: str | None = Field(
        default=None, description="Bookkeeping: the model does not see it."
    )
    schema_: dict[str, Any] = Field(alias="schema", description="What the text is valid by.")
    strict: bool | None = Field(
        default=None, description="The schema is kept to, whatever stands here."
    )


class JsonSchemaFormat(StrictBody):
    """JSON that is valid by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


def to_grammar(format: ResponseFormat, limits: LimitsConfig) -> str | None:
    """Return the grammar for `SamplingParams`, None for any text. Call it in a `schema_line`.

    Raises:
        InvalidRequestError: The schema is too large or can't be honoured.
    """
    match format:
        case TextFormat():
            return None
        case JsonObjectFormat():
            return json_schema_grammar(ANY_OBJECT, limits)
        case JsonSchemaFormat():
            return json_schema_grammar(format.json_schema.schema_, limits)
