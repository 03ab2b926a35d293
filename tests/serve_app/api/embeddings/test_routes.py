"""Embeddings through the whole application, with a fake model."""

import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI

from deployments.contract.errors import OverloadedError, PoolingFailedError
from serve_app.api.embeddings.routes import MAX_NUMBERS, MAX_NUMBERS_AT_ONCE, json_slices
from serve_app.api.embeddings.schema import Embedding, Embeddings
from serve_app.api.openai.text_schema import TextUsage
from tests.offenders import for_each
from tests.serve_app.apps import AppClient, Client, access_lines, client_of, make_app
from tests.serve_app.fake_pooler import MAX_MODEL_LEN, WIDTH, FakeClassifier, FakeEmbedder
from tests.serve_app.fakes import FakeBackend

PATH = "/v1/embeddings"
TOO_LONG = "a " * MAX_MODEL_LEN
PROMPTS = (("query", "c"), ("document", "d"))


@pytest.fixture
def embedder() -> FakeEmbedder:
    return FakeEmbedder()


@pytest.fixture
def app(backend: FakeBackend, embedder: FakeEmbedder) -> FastAPI:
    return make_app(
        backend, embedder=embedder, classifier=FakeClassifier(), limits={"max_num_texts": 3}
    )


async def embedded(client: AppClient, given: object, **fields: object) -> Any:
    return (await client.ask(PATH, {"model": "e", "input": given, **fields})).json()


async def refused(client: AppClient, **fields: object) -> Any:
    return (await client.ask(PATH, {"model": "e", "input": "a", **fields}, 400)).json()["error"]


async def test_an_answer_has_openai_s_shape(client: Client) -> None:
    answer = await embedded(client, "ab")
    assert answer.pop("id").startswith("embd-")
    half = pytest.approx(0.5**0.5)
    assert answer == {
        "object": "list",
        "created": 1_700_000_000,
        "model": "e",
        "data": [{"object": "embedding", "index": 0, "embedding": [half, half, 0, 0]}],
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("a", ("a",)),
        (["a", "b c"], ("a", "b c")),
        ([5, 6], ((5, 6),)),
        ([[5, 6], [7]], ((5, 6), (7,))),
    ],
)
async def test_the_input_may_be_texts_or_token_ids(
    client: Client, embedder: FakeEmbedder, given: object, texts: tuple[object, ...]
) -> None:
    answer = await embedded(client, given)
    assert [each["index"] for each in answer["data"]] == list(range(len(texts)))
    (request,) = embedder.requests
    assert request.texts == texts
    assert request.operation == "embeddings"
    assert not request.truncate


async def test_base64_holds_the_same_numbers(client: Client) -> None:
    (plain,) = (await embedded(client, "abb"))["data"]
    (packed,) = (await embedded(client, "abb", encoding_format="base64"))["data"]
    numbers = np.frombuffer(base64.b64decode(packed["embedding"]), "<f4")
    assert numbers.tolist() == plain["embedding"]


async def test_long_answers_are_written_in_the_same_way(backend: FakeBackend) -> None:
    num_texts = MAX_NUMBERS_AT_ONCE // WIDTH + 1
    app = make_app(backend, embedder=FakeEmbedder(), limits={"max_num_texts": num_texts})
    async with client_of(app) as client:
        answer = await embedded(client, ["a"] * num_texts)
        (one,) = (await embedded(client, "a"))["data"]
    assert [each["embedding"] for each in answer["data"]] == [one["embedding"]] * num_texts


async def test_as_many_texts_as_openai_takes_are_embedded_by_default(backend: FakeBackend) -> None:
    async with client_of(make_app(backend, embedder=FakeEmbedder())) as client:
        answer = await embedded(client, ["a"] * 2048)
        error = await refused(client, input=["a"] * 2049)
    assert len(answer["data"]) == 2048
    assert "at most 2048 are accepted (limits.max_num_texts)" in error["message"]


def test_an_answer_is_written_text_by_text() -> None:
    usage = TextUsage.of(3)
    empty = Embeddings(id="embd-r", created=1, model='a "data":[] b', data=[], usage=usage)
    data = [Embedding(index=index, embedding=[0.5, float(index)]) for index in range(3)]
    slices = list(json_slices(empty, iter(data)))
    assert b"".join(slices).decode() == empty.model_copy(update={"data": data}).model_dump_json()
    assert [each.count(b"index") for each in slices] == [0, 1, 1, 1, 0]


async def test_an_answer_that_would_be_too_long_is_refused_before_the_model_is_asked(
    client: Client, matryoshka: AppClient, embedder: FakeEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_NUMBERS, "float", 2 * WIDTH)
    monkeypatch.setitem(MAX_NUMBERS, "base64", 3 * WIDTH - 1)
    assert len((await embedded(client, ["a", "b"]))["data"]) == 2
    embedder.requests.clear()
    error = await refused(client, input=["a", "b", "c"])
    assert error["param"] == "input"
    assert (
        "12 numbers; at most 8 are returned as float. To mend it, send fewer texts."
        in (error["message"])
    )
    error = await refused(client, input=["a", "b", "c"], encoding_format="base64")
    assert "at most 11 are returned as base64" in error["message"]
    assert not embedder.requests
    error = await refused(matryoshka, input=["a", "b", "c"])
    assert error["message"].endswith("send fewer texts or ask for fewer dimensions.")
    assert await embedded(matryoshka, ["a", "b", "c"], dimensions=2)


async def test_base64_is_named_where_it_would_fit(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_NUMBERS, "float", WIDTH)
    error = await refused(client, input=["a", "b"])
    assert error["message"].endswith("send fewer texts or ask for encoding_format base64.")
    assert await embedded(client, ["a", "b"], encoding_format="base64")


@pytest.mark.parametrize("name", ["normalize", "use_activation"])
async def test_only_what_the_model_s_files_say_may_be_asked_for(client: Client, name: str) -> None:
    assert await embedded(client, "a", **{name: True})
    error = await refused(client, **{name: False})
    assert error["param"] == name
    assert "own files say that its vectors are normalized" in error["message"]
    app = make_app(client.backend, embedder=FakeEmbedder(is_normalized=False))
    async with client_of(app) as plain:
        assert await embedded(plain, "a", **{name: False})
        error = await refused(plain, **{name: True})
        assert error["param"] == name
        assert "own files say that its vectors are not normalized" in error["message"]


@pytest.fixture
async def matryoshka() -> AsyncIterator[AppClient]:
    async with client_of(make_app(FakeBackend(), embedder=FakeEmbedder("e", (2, 3)))) as client:
        yield client


async def test_dimensions_cut_vectors_and_normalize_them_again(matryoshka: AppClient) -> None:
    (found,) = (await embedded(matryoshka, "aaabbbbccd", dimensions=2))["data"]
    assert found["embedding"] == pytest.approx([0.6, 0.8])
    (whole,) = (await embedded(matryoshka, "aaabbbbccd", dimensions=WIDTH))["data"]
    assert len(whole["embedding"]) == WIDTH
    (zero,) = (await embedded(matryoshka, "cd", dimensions=2))["data"]
    assert zero["embedding"] == [0, 0]


async def test_other_dimensions_are_refused(matryoshka: AppClient, client: Client) -> None:
    error = await refused(matryoshka, dimensions=1)
    assert error["param"] == "dimensions"
    assert error["message"].endswith("choose from 2, 3, 4.")
    error = await refused(client, dimensions=2)
    assert error["param"] == "dimensions"
    assert "matryoshka_dimensions" in error["message"]
    assert await embedded(client, "a", dimensions=WIDTH)


async def test_a_model_may_allow_all_dimensions(backend: FakeBackend) -> None:
    async with client_of(make_app(backend, embedder=FakeEmbedder("e", ()))) as client:
        assert await embedded(client, "a", dimensions=1)
        assert "1 to 4" in (await refused(client, dimensions=5))["message"]


async def test_prompts_of_the_model_s_files_go_before_texts(backend: FakeBackend) -> None:
    embedder = FakeEmbedder("e", prompts=PROMPTS, default_prompt="query")
    async with client_of(make_app(backend, embedder=embedder)) as client:
        await embedded(client, ["a", "b"])
        await embedded(client, "a", prompt_name="document")
        await embedded(client, [5])  # token ids are read as they are
        assert [each.texts for each in embedder.requests] == [("ca", "cb"), ("da",), ((5,),)]
        error = await refused(client, prompt_name="passage")
        assert (
            "The model has no prompt 'passage'; its prompts: query, document." in (error["message"])
        )
        error = await refused(client, input=[5], prompt_name="query")
        assert error["param"] == "prompt_name"


async def test_a_text_that_is_too_long_is_refused_or_truncated(
    client: Client, embedder: FakeEmbedder
) -> None:
    error = await refused(client, input=["a", TOO_LONG])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    assert f"{MAX_MODEL_LEN + 2} tokens" in error["message"]
    assert error["message"].endswith('Send "truncate": true to drop its end.')
    assert (await refused(client, input=TOO_LONG))["param"] == "input"
    answer = await embedded(client, TOO_LONG, truncate=True)
    assert answer["usage"]["prompt_tokens"] == MAX_MODEL_LEN
    await embedded(client, "a", truncate_prompt_tokens=7)
    await embedded(client, "a", truncate_prompt_tokens=-1)
    *_, seven, all_ = embedder.requests
    assert (seven.truncate, seven.max_num_tokens) == (True, 7)
    assert (all_.truncate, all_.max_num_tokens) == (True, None)


@for_each(
    ({"input": []}, "input", "must not be empty"),
    ({"input": ""}, "input", "must not be empty"),
    ({"input": ["a", ""]}, "input[1]", "must not be empty"),
    ({"input": {"text": "a"}}, "input", "must be a string, a list of strings"),
    ({"input": ["a"] * 4}, "input", "max_num_texts"),
    ({"input": [[1]] * 4}, "input", "max_num_texts"),
    ({"encoding_format": "hex"}, "encoding_format", "base64"),
    ({"dimensions": 0}, "dimensions", "at least 1"),
    ({"input_type": "query"}, "input_type", "prompt_name"),
    ({"normalize": False}, "normalize", "own files"),
    ({"messages": [{"role": "user", "content": "a"}]}, "messages", "send them as input"),
    ({"truncate": True, "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "combined"),
    ({"modle": "e"}, "modle", "Did you mean 'model'"),
    ({"model": "m"}, "model", "can't embed texts. Models that can: e."),
    ({"model": "c"}, "model", "can't embed texts. Models that can: e."),
)
async def test_a_wrong_request_is_told_why(
    fields: dict[str, Any], param: str, words: str, client: Client
) -> None:
    error = await refused(client, **fields)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_other_routes_refuse_an_embedding_model(client: Client) -> None:
    answer = await client.post("/v1/completions", json={"model": "e", "prompt": "a"})
    assert answer.json()["error"]["code"] == "wrong_task"
    answer = await client.post("/v1/classify", json={"model": "e", "input": "a"})
    assert answer.json()["error"]["code"] == "wrong_task"


async def test_a_full_replica_s_refusal_keeps_its_advice(
    client: Client, embedder: FakeEmbedder
) -> None:
    embedder.refusal = OverloadedError("full", retry_after_s=7)
    answer = await client.post(PATH, json={"input": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")


async def test_a_text_that_fails_is_named(client: Client, embedder: FakeEmbedder) -> None:
    embedder.refusal = PoolingFailedError("The model failed.", "input[1]")
    answer = await client.ask(PATH, {"input": ["a", "b"]}, 500)
    assert answer.json()["error"]["param"] == "input[1]"


async def test_models_tell_that_it_embeds(client: Client) -> None:
    tasks = {each["id"]: each["task"] for each in (await client.get("/v1/models")).json()["data"]}
    assert tasks == {"m": "generate", "c": "classify", "e": "embed"}


async def test_the_access_log_names_model_and_tokens(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        await embedded(client, ["a", "b c"])
    (line,) = access_lines(caplog)
    assert (line["model"], line["prompt_tokens"], line["route"]) == ("e", 7, PATH)
