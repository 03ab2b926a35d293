"""Embeddings and rerank by `openai`, `cohere`, LangChain and sentence-transformers itself."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import cohere
import numpy as np
import openai
import pytest
from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_openai import OpenAIEmbeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from sentence_transformers import CrossEncoder, SentenceTransformer

from tests.clients.questions import MODEL
from tests.clients.tiny_poolers import EMBEDDER, MAX_MODEL_LEN, RERANKER, WIDTH
from tests.engines import only_raystream
from tests.serve_app.local_server import LocalServer

pytestmark = only_raystream("it asks models that embed; VllmPooler has tests of its own")

TEXTS = ["Join two paths.", "Return a new list.", "a", "b " * 50]
QUERY = "join"


def source_of(local: LocalServer, model: str) -> str:
    (source,) = (each.source for each in local.config.models if each.id == model)
    return source


def test_openai_s_vectors_are_those_of_sentence_transformers(
    client: openai.OpenAI, local: LocalServer
) -> None:
    theirs = SentenceTransformer(source_of(local, EMBEDDER), device="cpu")
    found = client.embeddings.create(model=EMBEDDER, input=TEXTS)
    vectors = np.array([each.embedding for each in found.data])
    np.testing.assert_allclose(vectors, theirs.encode(TEXTS), atol=1e-5)
    assert found.usage.prompt_tokens == found.usage.total_tokens > len(TEXTS)
    asked: dict[str, Any] = {"prompt_name": "query"}
    found = client.embeddings.create(
        model=EMBEDDER, input=QUERY, encoding_format="float", extra_body=asked
    )
    np.testing.assert_allclose(found.data[0].embedding, theirs.encode_query(QUERY), atol=1e-5)


def test_openai_s_dimensions_are_those_that_the_model_was_trained_for(
    client: openai.OpenAI,
) -> None:
    whole = client.embeddings.create(model=EMBEDDER, input="a").data[0].embedding
    short = client.embeddings.create(model=EMBEDDER, input="a", dimensions=8).data[0].embedding
    start = np.array(whole[:8])
    np.testing.assert_allclose(short, start / np.linalg.norm(start), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="choose from 8, 16"):
        client.embeddings.create(model=EMBEDDER, input="a", dimensions=WIDTH - 1)


def test_openai_s_errors_name_what_is_wrong(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"reads {MAX_MODEL_LEN} at most") as refused:
        client.embeddings.create(model=EMBEDDER, input=["a", "a" * 500])
    assert refused.value.param == "input[1]"
    with pytest.raises(openai.BadRequestError, match="can't embed texts"):
        client.embeddings.create(model=MODEL, input="a")
    found = client.embeddings.create(model=EMBEDDER, input="a" * 500, extra_body={"truncate": True})
    assert found.usage.prompt_tokens == MAX_MODEL_LEN


@pytest.fixture
def v2(local: LocalServer) -> Iterator[cohere.ClientV2]:
    with (
        local.old_client() as http,
        cohere.ClientV2(base_url=local.url, api_key="none", httpx_client=http) as client,
    ):
        yield client


def test_cohere_s_ranking_is_that_of_a_cross_encoder(
    v2: cohere.ClientV2, local: LocalServer
) -> None:
    theirs = CrossEncoder(source_of(local, RERANKER), device="cpu")
    expected = theirs.rank(QUERY, TEXTS)
    found = v2.rerank(model=RERANKER, query=QUERY, documents=TEXTS)
    assert [each.index for each in found.results] == [each["corpus_id"] for each in expected]
    np.testing.assert_allclose(
        [each.relevance_score for each in found.results],
        [each["score"] for each in expected],
        atol=1e-5,
    )
    assert found.meta is not None
    assert found.meta.billed_units is not None
    assert found.meta.billed_units.search_units == 1
    best = v2.rerank(model=RERANKER, query=QUERY, documents=TEXTS, top_n=2)
    assert [each.index for each in best.results] == [each.index for each in found.results[:2]]


def test_cohere_s_first_api_returns_documents(local: LocalServer) -> None:
    documents = [*TEXTS, {"text": "join", "title": "os.path.join"}]
    with (
        local.old_client() as http,
        cohere.Client(base_url=local.url, api_key="none", httpx_client=http) as client,
    ):
        found = client.rerank(
            model=RERANKER, query=QUERY, documents=documents, return_documents=True
        )
    read = {each.index: each.document.dict() for each in found.results if each.document}
    assert read == {**{i: {"text": text} for i, text in enumerate(TEXTS)}, 4: documents[4]}


def test_cohere_s_error_has_its_message(v2: cohere.ClientV2) -> None:
    with pytest.raises(cohere.BadRequestError) as refused:
        v2.rerank(model=MODEL, query=QUERY, documents=TEXTS)
    body: Any = refused.value.body
    assert set(body) == {"id", "message"}
    assert "can't compare texts" in body["message"]


def test_an_embedding_model_ranks_by_cosines(v2: cohere.ClientV2, local: LocalServer) -> None:
    theirs = SentenceTransformer(source_of(local, EMBEDDER), device="cpu")
    cosines = theirs.encode_document(TEXTS) @ theirs.encode_query(QUERY)
    found = v2.rerank(model=EMBEDDER, query=QUERY, documents=TEXTS)
    scores = {each.index: each.relevance_score for each in found.results}
    np.testing.assert_allclose([scores[i] for i in range(len(TEXTS))], cosines, atol=1e-5)


def test_langchain_ranks_documents(v2: cohere.ClientV2) -> None:
    reranker = CohereRerank(client=v2, model=RERANKER, top_n=2)
    found = reranker.compress_documents([Document(page_content=text) for text in TEXTS], QUERY)
    scores = [each.metadata["relevance_score"] for each in found]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)


class TestOpenAIEmbeddings(EmbeddingsIntegrationTests):
    """LangChain's own tests of embeddings."""

    @pytest.fixture(autouse=True)
    async def _served(self, local: LocalServer) -> AsyncIterator[None]:
        self.base_url = f"{local.url}/v1"
        with local.client() as self.http_client:
            async with local.async_client() as self.http_async_client:
                yield

    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {
            "model": EMBEDDER,
            "base_url": self.base_url,
            "api_key": "none",
            "check_embedding_ctx_length": False,
            "http_client": self.http_client,
            "http_async_client": self.http_async_client,
        }
