"""OpenAI's embeddings on the wire.

Source: https://platform.openai.com/docs/api-reference/embeddings
"""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, Tag

from serve_app.api.openai.text_schema import (
    PROMPT_FORMS,
    CutTextsBody,
    PromptTokenIds,
    Text,
    TextUsage,
)
from serve_app.config import MAX_NUM_TEXTS

MAX_WIDTH = 2**20
"""More numbers than any vector has."""

Input = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[
        list[Text], Tag("texts"), Field(min_length=1, max_length=MAX_NUM_TEXTS, fail_fast=True)
    ]
    | Annotated[PromptTokenIds, Tag("token_ids")]
    | Annotated[
        list[PromptTokenIds],
        Tag("lists"),
        Field(min_length=1, max_length=MAX_NUM_TEXTS, fail_fast=True),
    ],
    PROMPT_FORMS,
]


class EmbeddingsBody(CutTextsBody):
    """Texts, and the model that embeds them."""

    model: str | None = Field(default=None, description="Null means the first embedding model.")
    input: Input = Field(
        description="One text or several, or their token ids, which are read as they are."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None,
        description="float: a list of numbers. base64: the bytes of the numbers, float32 in "
        "little-endian order. Null means float.",
    )
    dimensions: int | None = Field(
        default=None,
        ge=1,
        le=MAX_WIDTH,
        description="Cut the vectors to this many numbers, and bring them back to the length 1 if "
        "the model's vectors have it. Only for models that were trained for it (Matryoshka).",
    )
    prompt_name: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None,
        description="Put the prompt of this name before each text: one of those in the model's "
        "config_sentence_transformers.json, such as query. Null means the model's default.",
    )
    normalize: bool | None = Field(
        default=None,
        description="Whether vectors have the length 1. The model's own files say so; null, and "
        "what they say, are accepted.",
    )
    use_activation: bool | None = Field(default=None, description="vLLM's word for normalize.")


class Embedding(BaseModel):
    """The vector of a text."""

    object: Literal["embedding"] = "embedding"
    index: int = Field(description="The text's place in the input, from 0.")
    embedding: list[float] | str = Field(description="The numbers, or their bytes in base64.")


class Embeddings(BaseModel):
    """The vector of each text."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: TextUsage
