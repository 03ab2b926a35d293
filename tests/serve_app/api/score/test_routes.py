"""Scores through the whole application, with fake models."""

import threading
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.pooling import TextPair
from serve_app.api.requests import comparer
from serve_app.api.requests.comparer import cosines
from tests.offenders import for_each
from tests.serve_app.apps import AppClient, Client, make_app
from tests.serve_app.fake_pooler import MAX_MODEL_LEN, WIDTH, FakeCrossEncoder, FakeEmbedder
from tests.serve_app.fakes import FakeBackend

TOO_LONG = "a " * MAX_MODEL_LEN


@pytest.fixture
def cross_encoder() -> FakeCrossEncoder:
    return FakeCrossEncoder()


@pytest.fixture
def embedder() -> FakeEmbedder:
    return FakeEmbedder("e", prompts=(("query", "c"), ("all", "d")), default_prompt="all")


@pytest.fixture
def app(backend: FakeBackend, cross_encoder: FakeCrossEncoder, embedder: FakeEmbedder) -> FastAPI:
    return make_app(backend, cross_encoder=cross_encoder, embedder=embedder)


async def scored(client: AppClient, one: Any, other: Any, **fields: Any) -> Any:
    body = {"model": "x", "text_1": one, "text_2": other, **fields}
    return (await client.ask("/score", body)).json()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_an_answer_has_vllm_s_shape(client: Client, path: str) -> None:
    body = {"model": "x", "text_1": "two words", "text_2": ["two", "three words", "none"]}
    answer = (await client.post(path, json=body)).json()
    assert answer.pop("id").startswith("score-")
    assert answer == {
        "object": "list",
        "created": 1_700_000_000,
        "model": "x",
        "data": [
            {"index": 0, "object": "score", "score": 0.5},
            {"index": 1, "object": "score", "score": 0.5},
            {"index": 2, "object": "score", "score": 0},
        ],
        "usage": {"prompt_tokens": 19, "total_tokens": 19},
    }


@pytest.mark.parametrize(
    ("one", "other", "pairs"),
    [
        ("a", "b", [("a", "b")]),
        (["a"], ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
    ],
)
async def test_texts_are_paired_as_in_vllm(
    client: Client,
    cross_encoder: FakeCrossEncoder,
    one: Any,
    other: Any,
    pairs: list[tuple[str, str]],
) -> None:
    assert len((await scored(client, one, other))["data"]) == len(pairs)
    assert cross_encoder.requests[0].texts == tuple(TextPair(*pair) for pair in pairs)


async def test_an_embedding_model_scores_by_the_cosine_with_its_default_prompt(
    client: Client, embedder: FakeEmbedder
) -> None:
    answer = await scored(client, "a", ["a", "b"], model="e")
    assert embedder.requests[0].texts == ("da", "da", "db")
    assert [each["score"] for each in answer["data"]] == pytest.approx([1, 0.5])


@for_each(
    ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "as many as in text_2"),
    ({"text_2": []}, "text_2", "must not be empty"),
    ({"text_2": None}, "text_2", "must be a string or a list of strings"),
    ({"queries": "a"}, "queries", "send text_1"),
    ({"text_2": ["a", TOO_LONG]}, "text_2[1]", 'Send "truncate": true'),
    ({"text_2": TOO_LONG}, "text_2", 'Send "truncate": true'),
    ({"model": "e", "text_1": TOO_LONG}, "text_1", 'Send "truncate": true'),
)
async def test_a_wrong_request_is_told_why(
    fields: dict[str, Any], param: str, words: str, client: Client
) -> None:
    body = {"model": "x", "text_1": "a", "text_2": "b", **fields}
    error = (await client.ask("/score", body, 400)).json()["error"]
    assert error["param"] == param
    assert words in error["message"]


async def test_many_vectors_are_compared_off_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def watched(*vectors: Any) -> list[float]:
        threads.append(threading.current_thread())
        return cosines(*vectors)

    monkeypatch.setattr(comparer, "cosines", watched)
    monkeypatch.setattr(comparer, "MAX_NUMBERS_AT_ONCE", 3 * WIDTH)
    few = await scored(client, "a", ["a", "b"], model="e")
    many = await scored(client, "a", ["a", "b", "b"], model="e")
    assert [each["score"] for each in many["data"]] == pytest.approx([1, 0.5, 0.5])
    assert many["data"][:2] == few["data"]
    assert [each is threading.main_thread() for each in threads] == [True, False]


NUMBERS = st.floats(-1e3, 1e3, width=32)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=2, max_size=5))
def test_cosines_are_bounded_and_do_not_depend_on_length(rows: list[tuple[float, ...]]) -> None:
    vectors = np.array(rows, np.float32)
    found = cosines(vectors[:1], vectors[1:])
    assert all(abs(score) <= 1 + 1e-9 for score in found)
    if (np.linalg.norm(vectors, axis=1) > 1e-3).all():
        assert cosines(vectors[:1] * np.float32(4), vectors[1:] / np.float32(2)) == pytest.approx(
            found, abs=1e-6
        )
        assert cosines(vectors[:1], vectors[:1]) == pytest.approx([1])
