"""Classification over replicas of real classifiers: a piece scores the same as its text alone."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from math import fsum
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from deployments.text_pooler import TextPooler
from raystream.local_handle import LocalHandle
from serve_app.backends.replicas.handle_backend import HandleBackend
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.deployments.tiny_folder import spec
from tests.pooling.tiny_folder import framing_tokenizer, save_classifier
from tests.serve_app.apps import AppClient, client_of
from tests.serve_app.local_replica import local_replica

ROOT = Path(__file__).resolve().parents[4]
POOLER, DETECTOR = "tiny-classifier", "pydoc-detector"
# 5,000 characters that are easily cut in the wrong place, in sentences of different lengths.
TEXT = "".join(
    f"Sentence {number} has \u00e9 in it{', and goes on' * (number % 4)}. " for number in range(200)
)[:5000]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("roberta"))


@pytest.fixture(scope="module")
def poolers(folder: Path) -> Iterator[dict[str, TextPooler]]:
    tiny = spec(folder, id=POOLER, max_batched_tokens=512)
    shipped = {"id": DETECTOR, "max_model_len": 1280, "max_batched_tokens": 2048}
    embedded = spec(ROOT / "models" / DETECTOR, **shipped)
    with local_replica(TextPooler, tiny) as pooler, local_replica(TextPooler, embedded) as detector:
        yield {POOLER: pooler, DETECTOR: detector}


@pytest.fixture
async def client(
    poolers: dict[str, TextPooler], config: AppConfig
) -> AsyncIterator[httpx.AsyncClient]:
    handles: dict[str, Any] = {id_: LocalHandle(pooler) for id_, pooler in poolers.items()}
    async with (
        aclosing(HandleBackend(handles[POOLER])) as tiny,
        aclosing(HandleBackend(handles[DETECTOR])) as detector,
        client_of(
            build_app(AppParts(config, {}, classifiers={POOLER: tiny, DETECTOR: detector}))
        ) as client,
    ):
        yield client


async def ask(client: httpx.AsyncClient, path: str, **body: object) -> httpx.Response:
    return await client.post(path, json={"model": POOLER, **body})


async def test_5000_characters_are_classified_in_pieces_and_as_a_whole(
    client: AppClient, folder: Path
) -> None:
    asked: dict[str, Any] = {"input": ["short", TEXT], "split": {"max_chars": 100}}
    answer = (await ask(client, "/v1/classify", **asked)).raise_for_status().json()
    told = answer["data"][1]
    pieces = told["pieces"]
    texts = [TEXT[piece["start"] : piece["end"]] for piece in pieces]
    assert "".join(texts) == TEXT
    assert len(texts) >= 50
    assert all(len(text) <= 100 for text in texts)
    for piece in pieces[:-1]:
        assert TEXT[piece["end"] - 1].isspace() or TEXT[piece["end"]].isspace(), "a word was cut"
    expected = expected_scores(folder, texts)
    for piece, scores in zip(pieces, expected, strict=True):
        assert by_label(piece) == pytest.approx(scores, abs=1e-5)
        assert piece["label"] == max(scores, key=lambda label: scores[label])
    for label, score in by_label(told).items():
        weighed = (scores[label] * len(text) for text, scores in zip(texts, expected, strict=True))
        assert score == pytest.approx(fsum(weighed) / len(TEXT), abs=1e-5)
    tokenizer = framing_tokenizer()
    num_tokens = sum(len(tokenizer(text)["input_ids"]) for text in ["short", *texts])
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens


async def test_the_embedded_detector_reads_5000_characters_of_documentation(
    client: AppClient,
) -> None:
    text = " ".join(" ".join(topics.values()).split())[:5000]
    body = {"model": DETECTOR, "input": text, "split": {}}
    (told,) = (await ask(client, "/v1/classify", **body)).raise_for_status().json()["data"]
    assert told["label"] == "human"
    assert "".join(text[piece["start"] : piece["end"]] for piece in told["pieces"]) == text
    assert len(told["pieces"]) >= 5000 / 300
    lengths = [piece["end"] - piece["start"] for piece in told["pieces"]]
    for label, score in by_label(told).items():
        weighed = zip(map(by_label, told["pieces"]), lengths, strict=True)
        assert score == pytest.approx(fsum(each[label] * n for each, n in weighed) / 5000)
    asked = {**body, "split": {"aggregate": "max"}}
    (highest,) = (await ask(client, "/v1/classify", **asked)).json()["data"]
    for label, score in by_label(highest).items():
        assert score == max(by_label(piece)[label] for piece in told["pieces"])


def by_label(told: dict[str, Any]) -> dict[str, float]:
    return {each["label"]: each["score"] for each in told["scores"]}


def expected_scores(folder: Path, texts: list[str]) -> list[dict[str, float]]:
    """Return the scores of transformers' own model for each text alone."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = framing_tokenizer()
    labels = [model.config.id2label[index] for index in range(model.config.num_labels)]
    with torch.inference_mode():
        scored = [
            model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0].softmax(-1).tolist()
            for text in texts
        ]
    return [dict(zip(labels, scores, strict=True)) for scores in scored]


async def test_vllm_s_shape_has_the_same_scores(client: AppClient, folder: Path) -> None:
    texts = ["one", "another"]
    answer = (await ask(client, "/classify", input=texts)).raise_for_status().json()
    for told, scores in zip(answer["data"], expected_scores(folder, texts), strict=True):
        assert told["probs"] == pytest.approx(list(scores.values()), abs=1e-5)
        assert told["num_classes"] == len(scores)


async def test_a_text_that_is_too_long_is_refused_with_its_place_or_truncated(
    client: AppClient,
) -> None:
    answer = await ask(client, "/v1/classify", input=["short", TEXT])
    error = answer.json()["error"]
    told = (answer.status_code, error["code"], error["param"])
    assert told == (400, "context_length_exceeded", "input[1]")
    assert '"split"' in error["message"]
    cut = (await ask(client, "/v1/classify", input=["short", TEXT], truncate=True)).json()["data"]
    assert [each["truncated"] for each in cut] == [False, True]
