"""`POST /rerank`, `/v1/rerank` and `/v2/rerank`: sort documents by how well they answer a query.

All three take and give the same shape, which holds what Cohere's, Jina's and vLLM's clients read.
"""

from typing import Final

from fastapi import APIRouter, Request

from deployments.contract.descriptions import EmbeddingDescription
from serve_app.api.body.limits import check_texts
from serve_app.api.openai.text_schema import TextUsage
from serve_app.api.requests.comparer import Compared, Comparison, Texts, compare
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.sentence_prompts import role_prompts
from serve_app.api.rerank.schema import (
    ApiVersion,
    BilledUnits,
    Meta,
    Ranked,
    Ranking,
    ReadTokens,
    RerankBody,
)
from serve_app.http.json_route import JsonRoute
from serve_app.http.request_id import request_id_of

DOCUMENTS_OF_A_UNIT: Final = 100
"""Documents that Cohere bills as one search."""

VERSIONS: Final = {"/rerank": "1", "/v1/rerank": "1", "/v2/rerank": "2"}
"""The versions of the API that answers at each path."""


class RerankApi:
    """Ranks documents."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(route_class=JsonRoute, tags=["ranking"])
        for path in VERSIONS:
            router.add_api_route(
                path,
                self.rerank_v2 if path == "/v2/rerank" else self.rerank,
                methods=["POST"],
                response_model=Ranking,
                summary="Rank documents by a query",
                operation_id=f"rerank{path.replace('/', '_')}",
            )
        return router

    async def rerank(self, body: RerankBody, request: Request) -> Ranking:
        """Return the documents with their scores, best first."""
        return await self._rank(body, request, "1", body.return_documents is not False)

    async def rerank_v2(self, body: RerankBody, request: Request) -> Ranking:
        """Return the documents' places with their scores, best first."""
        return await self._rank(body, request, "2", body.return_documents is True)

    async def _rank(
        self, body: RerankBody, request: Request, version: str, with_documents: bool
    ) -> Ranking:
        model = await self._context.models.find_comparer(body.model)
        documents = [document.text for document in body.documents]
        check_texts([body.query, *documents], self._context.limits, "documents")
        query_prompt, document_prompt = _prompts(model.description.embedding)
        compared = await compare(
            model,
            Comparison(
                request_id_of(request),
                "rerank",
                Texts([body.query], "query", is_list=False, prompt=query_prompt),
                Texts(documents, "documents", is_list=True, prompt=document_prompt),
                truncate=body.drops_ends,
                max_num_tokens=body.max_num_tokens,
                max_second_tokens=body.max_tokens_per_doc,
                priority=body.priority,
            ),
            self._context.limits,
        )
        order = sorted(range(len(documents)), key=lambda index: -compared.scores[index])
        return Ranking(
            id=f"rerank-{request_id_of(request)}",
            model=model.description.id,
            results=[
                Ranked(
                    index=index,
                    relevance_score=compared.scores[index],
                    document=body.documents[index] if with_documents else None,
                )
                for index in order[: body.top_n or None]
            ],
            usage=TextUsage.of(compared.num_tokens),
            meta=_meta(compared, version),
        )


def _prompts(vectors: EmbeddingDescription | None) -> tuple[str, str]:
    """Return what is read before a query and before a document; a cross-encoder reads nothing."""
    return ("", "") if vectors is None else role_prompts(vectors)


def _meta(compared: Compared, version: str) -> Meta:
    return Meta(
        api_version=ApiVersion(version=version),
        billed_units=BilledUnits(
            search_units=-(-len(compared.scores) // DOCUMENTS_OF_A_UNIT),
        ),
        tokens=ReadTokens(input_tokens=compared.num_tokens),
    )
