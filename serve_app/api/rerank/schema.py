"""Ranking documents on the wire: one shape for the clients of Cohere, Jina and vLLM.

Source: https://docs.cohere.com/reference/rerank, https://jina.ai/reranker/, and
https://docs.vllm.ai/en/stable/serving/openai_compatible_server/ (Re-rank API)
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from serve_app.api.body.wrong_type import wrong_type
from serve_app.api.openai.text_schema import (
    CutTextsBody,
    NumTokens,
    Text,
    TextUsage,
)
from serve_app.config import MAX_NUM_TEXTS


class Document(BaseModel):
    """A document: its text, and any fields of the client's own, which come back unread."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    text: Text


def _as_document(document: Any) -> Any:
    if not isinstance(document, str | dict):
        raise wrong_type("a string or an object with a text")
    return {"text": document} if isinstance(document, str) else document


TextOrDocument = Annotated[
    Document, BeforeValidator(_as_document, json_schema_input_type=Text | Document)
]


class RerankBody(CutTextsBody):
    """A query, and documents to sort by how well they answer it."""

    model: str | None = Field(
        default=None,
        description="Null means the first cross-encoder, or else the first embedding model.",
    )
    query: Text
    documents: Annotated[
        list[TextOrDocument], Field(min_length=1, max_length=MAX_NUM_TEXTS, fail_fast=True)
    ] = Field(
        description='Strings, or objects {"text"}. Objects may have other fields, which come back '
        "with the documents."
    )
    top_n: int | None = Field(
        default=None, ge=0, description="Return this many of the best; null or 0 means all."
    )
    return_documents: bool | None = Field(
        default=None,
        description="Whether results hold the documents. Null means true, except at /v2/rerank, "
        "where it means false.",
    )
    max_tokens_per_doc: NumTokens | None = Field(
        default=None, description="Drop the end of documents that have more tokens than this."
    )


class Ranked(BaseModel):
    """A document's place among the others."""

    index: int = Field(description="The document's place in the request, from 0.")
    relevance_score: float = Field(
        description="Higher is better. A cross-encoder's score, from 0 to 1 unless its files say "
        "otherwise; an embedding model's cosine, from -1 to 1."
    )
    document: Document | None = Field(
        default=None,
        exclude_if=lambda document: document is None,
        description="Absent if the request does not ask for documents.",
    )


class ApiVersion(BaseModel):
    """The version of the API."""

    version: str


class BilledUnits(BaseModel):
    """What Cohere would bill."""

    search_units: int


class ReadTokens(BaseModel):
    """Tokens that the model has read."""

    input_tokens: int


class Meta(BaseModel):
    """What Cohere's clients read beside the results."""

    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: ReadTokens


class Ranking(BaseModel):
    """The documents, best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: TextUsage
    meta: Meta
