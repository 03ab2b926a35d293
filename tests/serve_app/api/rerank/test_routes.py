"""Ranking through the whole application, with fake models."""

from typing import Any

import pytest
from fastapi import FastAPI

from deployments.contract.errors import InvalidRequestError
from deployments.contract.pooling import TextPair
from tests.offenders import for_each
from tests.serve_app.apps import AppClient, Client, access_lines, client_of, make_app
from tests.serve_app.fake_pooler import (
    MAX_MODEL_LEN,
    FakeClassifier,
    FakeCrossEncoder,
    FakeEmbedder,
)
from tests.serve_app.fakes import FakeBackend

PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
QUERY = "join two paths"
DOCUMENTS = ["nothing here", "join two paths together", "two lists"]
TOO_LONG = "a " * MAX_MODEL_LEN


@pytest.fixture
def cross_encoder() -> FakeCrossEncoder:
    return FakeCrossEncoder()


@pytest.fixture
def embedder() -> FakeEmbedder:
    return FakeEmbedder("e", prompts=(("query", "c"), ("document", "d"), ("other", "x")))


@pytest.fixture
def app(backend: FakeBackend, cross_encoder: FakeCrossEncoder, embedder: FakeEmbedder) -> FastAPI:
    return make_app(
        backend,
        classifier=FakeClassifier(),
        cross_encoder=cross_encoder,
        embedder=embedder,
        limits={"max_num_texts": 4},
    )


async def ranked(client: AppClient, path: str = "/rerank", **fields: object) -> Any:
    body = {"model": "x", "query": QUERY, "documents": DOCUMENTS, **fields}
    return (await client.ask(path, body)).json()


async def test_an_answer_holds_what_jina_s_and_cohere_s_clients_read(client: Client) -> None:
    answer = await ranked(client, "/v1/rerank")
    assert answer.pop("id").startswith("rerank-")
    third = pytest.approx(1 / 3)
    assert answer == {
        "model": "x",
        "results": [
            {"index": 1, "relevance_score": 1, "document": {"text": DOCUMENTS[1]}},
            {"index": 2, "relevance_score": third, "document": {"text": DOCUMENTS[2]}},
            {"index": 0, "relevance_score": 0, "document": {"text": DOCUMENTS[0]}},
        ],
        "usage": {"prompt_tokens": 26, "total_tokens": 26},
        "meta": {
            "api_version": {"version": "1"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": 26},
        },
    }


@pytest.mark.parametrize("path", PATHS)
async def test_documents_come_back_if_asked_for(client: Client, path: str) -> None:
    by_default = path != "/v2/rerank"
    for asked, expected in ((None, by_default), (True, True), (False, False)):
        answer = await ranked(client, path, return_documents=asked)
        assert all(("document" in each) == expected for each in answer["results"])


@pytest.mark.parametrize("path", PATHS)
async def test_a_document_s_other_fields_come_back_unread(
    client: Client, cross_encoder: FakeCrossEncoder, path: str
) -> None:
    documents = [
        {"text": "nothing here", "title": "join two paths"},
        {"id": 7, "text": "join two paths", "at": {"page": [1, None], "model_config": 0.5}},
        "two",
    ]
    answer = await ranked(client, path, documents=documents, return_documents=True)
    found = {each["index"]: each["document"] for each in answer["results"]}
    assert found == {0: documents[0], 1: documents[1], 2: {"text": "two"}}
    assert [each["index"] for each in answer["results"]] == [1, 2, 0]
    (request,) = cross_encoder.requests
    read = [pair.second for pair in request.texts if isinstance(pair, TextPair)]
    assert read == ["nothing here", "join two paths", "two"]


async def test_top_n_keeps_the_best(client: Client) -> None:
    assert [each["index"] for each in (await ranked(client, top_n=2))["results"]] == [1, 2]
    for everything in (0, 9, None):
        assert len((await ranked(client, top_n=everything))["results"]) == 3


async def test_equal_documents_keep_their_order(client: Client) -> None:
    answer = await ranked(client, documents=["two", {"text": "two"}, "paths"])
    assert [each["index"] for each in answer["results"]] == [0, 1, 2]


async def test_a_cross_encoder_reads_the_query_with_each_document(
    client: Client, cross_encoder: FakeCrossEncoder
) -> None:
    await ranked(client, max_tokens_per_doc=9)
    (request,) = cross_encoder.requests
    assert request.texts == tuple(TextPair(QUERY, document) for document in DOCUMENTS)
    assert (request.max_text_tokens, request.truncate) == (9, False)
    assert request.operation == "rerank"


async def test_an_embedding_model_reads_prompts_and_is_asked_once(
    client: Client, embedder: FakeEmbedder
) -> None:
    answer = await ranked(client, model="e", query="a", documents=["b", "a"])
    (request,) = embedder.requests
    assert request.texts == ("ca", "db", "da")
    # The cosine of (1, 0, 1, 0) and (1, 0, 0, 1).
    assert answer["results"][0]["relevance_score"] == pytest.approx(0.5)


async def test_an_embedding_model_s_query_is_not_cut_with_its_documents(
    client: Client, embedder: FakeEmbedder
) -> None:
    await ranked(client, model="e", max_tokens_per_doc=1)
    (request,) = embedder.requests
    assert (len(request.texts), request.max_text_tokens, request.num_whole) == (4, 1, 1)


async def test_without_a_name_the_cross_encoder_answers(client: Client) -> None:
    assert (await ranked(client, model=None))["model"] == "x"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"query": ""}, "query"),
    ({"documents": []}, "documents"),
    ({"documents": [5]}, "must be a string or an object with a text"),
    ({"documents": ["a"] * 4}, "max_num_texts"),
    ({"documents": ["a", {"title": "b"}]}, "documents[1].text is missing"),
    ({"documents": [{"text": 5, "title": "b"}]}, "documents[0].text must be a string"),
    ({"documents": [{"text": "", "title": "b"}]}, "documents[0].text must not be empty"),
    ({"texts": ["a"]}, "Cohere's and Jina's shape"),
    ({"raw_scores": True}, "raw_scores is not supported here"),
    ({"rank_fields": ["title"]}, "a document is read by its text"),
    ({"max_chunks_per_doc": 3}, "max_tokens_per_doc"),
    ({"documents": ["a", TOO_LONG]}, 'Send "truncate": true'),
    ({"model": "m"}, "can't compare texts. Models that can: x, e."),
    ({"model": "c"}, "can't compare texts. Models that can: x, e."),
]


@for_each(*((path, fields, words) for path in PATHS for fields, words in WRONG))
async def test_a_wrong_request_is_told_why_in_the_path_s_shape(
    path: str, fields: dict[str, Any], words: str, client: Client
) -> None:
    await client.post("/rerank", json={"query": "a", "documents": ["a"]})  # the models are known
    body = {"model": "x", "query": QUERY, "documents": DOCUMENTS, **fields}
    answer = await client.ask(path, body, 400)
    told = answer.json()
    if path == "/v2/rerank":
        assert set(told) == {"id", "message"}
        assert told["id"] == answer.headers["x-request-id"]
        assert words in told["message"]
    else:
        assert words in told["error"]["message"]


@pytest.mark.parametrize(
    ("model", "place"), [("x", {"documents": ["a", TOO_LONG]}), ("e", {"query": TOO_LONG})]
)
async def test_an_error_names_the_client_s_own_field(
    client: Client, model: str, place: dict[str, Any]
) -> None:
    body = {"model": model, "query": "a", "documents": ["a"], **place}
    error = (await client.post("/rerank", json=body)).json()["error"]
    assert error["param"] == ("documents[1]" if model == "x" else "query")
    assert error["code"] == "context_length_exceeded"
    await client.ask("/rerank", {**body, "truncate": True})


@pytest.mark.parametrize("model", ["x", "e"])
async def test_an_error_about_all_texts_names_the_documents(
    client: Client, cross_encoder: FakeCrossEncoder, embedder: FakeEmbedder, model: str
) -> None:
    cross_encoder.refusal = embedder.refusal = InvalidRequestError("Too many tokens.", "input")
    body = {"model": model, "query": QUERY, "documents": DOCUMENTS}
    error = (await client.post("/rerank", json=body)).json()["error"]
    assert error["param"] == "documents"


async def test_a_key_s_refusal_at_v2_has_cohere_s_shape(client: Client) -> None:
    answer = await client.post("/v2/rerank", content=b"no JSON")
    assert answer.status_code == 415
    assert set(answer.json()) == {"id", "message"}


async def test_the_access_log_names_model_and_tokens(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        await ranked(client)
    (line,) = access_lines(caplog)
    assert (line["model"], line["prompt_tokens"], line["route"]) == ("x", 26, "/rerank")


async def test_a_query_counts_for_each_document_that_it_is_read_with(
    backend: FakeBackend, cross_encoder: FakeCrossEncoder
) -> None:
    limits = {"max_prompt_bytes": 100}
    app = make_app(backend, cross_encoder=cross_encoder, embedder=FakeEmbedder(), limits=limits)
    body = {"query": "q" * 30, "documents": ["a", "b", "c", "d"]}
    async with client_of(app) as client:
        error = await client.refused("/rerank", {"model": "x", **body})
        assert error["param"] == "documents"
        assert "The pairs have 124 bytes" in error["message"]
        assert not cross_encoder.requests
        assert (await client.post("/rerank", json={"model": "e", **body})).status_code == 200


async def test_without_such_a_model_the_refusal_says_so(backend: FakeBackend) -> None:
    async with client_of(make_app(backend, classifier=FakeClassifier())) as client:
        error = await client.refused("/rerank", {"query": "a", "documents": ["a"]}, 404)
    assert error["message"] == "No model here can compare texts."
