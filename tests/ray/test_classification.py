"""A classifier on a real Ray, asked over HTTP: a piece scores the same as its text alone."""

from collections.abc import Iterator
from math import fsum
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import pytest
import torch
from ray import serve
from transformers import AutoModelForSequenceClassification

from deployments.text_generator import TextGenerator
from deployments.text_pooler import TextPooler
from serve_app.config import AppConfig, ModelConfig
from serve_app.ingress import Ingress
from tests.deployments.tiny_folder import spec
from tests.pooling.tiny_folder import framing_tokenizer, save_classifier
from tests.ray.serve_run import ROOT

POOLER, GENERATOR, DETECTOR = "tiny-classifier", "tiny", "pydoc-detector"
# 5,000 characters that are easily cut in the wrong place, in sentences of different lengths.
TEXT = "".join(
    f"Sentence {number} has \u00e9 in it{', and goes on' * (number % 4)}. " for number in range(200)
)[:5000]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("roberta"))


@pytest.fixture(scope="module")
def url(base_url: str, tiny_folder: Path, folder: Path) -> Iterator[str]:
    generating = ModelConfig(id=GENERATOR, source="tiny")
    classifying = ModelConfig(id=POOLER, source="tiny", task="classify")
    detecting = ModelConfig(id=DETECTOR, source="models/pydoc-detector", task="classify")
    config = AppConfig(models=(generating, classifying, detecting))
    options = {"num_cpus": 0.5}
    handles = {
        GENERATOR: serve.deployment(name=GENERATOR, ray_actor_options=options)(TextGenerator).bind(
            spec(tiny_folder)
        ),
        POOLER: serve.deployment(name=POOLER, ray_actor_options=options)(TextPooler).bind(
            spec(folder, id=POOLER, max_batched_tokens=512)
        ),
        DETECTOR: serve.deployment(name=DETECTOR, ray_actor_options=options)(TextPooler).bind(
            spec(ROOT / detecting.source, id=DETECTOR, max_model_len=1280, max_batched_tokens=2048)
        ),
    }
    ingress = serve.deployment(name="Ingress", ray_actor_options=options)(Ingress)
    serve.run(ingress.bind(config, handles), name="classification", route_prefix="/classification")
    yield f"{base_url}/classification"
    serve.delete("classification")


def ask(url: str, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{url}{path}", json={"model": POOLER, **body}, timeout=60)


def test_5000_characters_are_classified_in_pieces_and_as_a_whole(url: str, folder: Path) -> None:
    split = {"max_chars": 100}
    answer = ask(url, "/v1/classify", input=["short", TEXT], split=split).raise_for_status().json()
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


def test_the_embedded_detector_reads_5000_characters_of_documentation(url: str) -> None:
    text = " ".join(" ".join(topics.values()).split())[:5000]
    body = {"model": DETECTOR, "input": text, "split": {}}
    (told,) = ask(url, "/v1/classify", **body).raise_for_status().json()["data"]
    assert told["label"] == "human"
    assert "".join(text[piece["start"] : piece["end"]] for piece in told["pieces"]) == text
    assert len(told["pieces"]) >= 5000 / 300
    lengths = [piece["end"] - piece["start"] for piece in told["pieces"]]
    for label, score in by_label(told).items():
        weighed = zip(map(by_label, told["pieces"]), lengths, strict=True)
        assert score == pytest.approx(fsum(each[label] * n for each, n in weighed) / 5000)
    (highest,) = ask(url, "/v1/classify", **{**body, "split": {"aggregate": "max"}}).json()["data"]
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


def test_vllm_s_shape_has_the_same_scores(url: str, folder: Path) -> None:
    answer = ask(url, "/classify", input=["one", "another"]).raise_for_status().json()
    for told, scores in zip(
        answer["data"], expected_scores(folder, ["one", "another"]), strict=True
    ):
        assert told["probs"] == pytest.approx(list(scores.values()), abs=1e-5)
        assert told["num_classes"] == len(scores)


def test_a_text_that_is_too_long_is_refused_with_its_place(url: str) -> None:
    answer = ask(url, "/v1/classify", input=["short", TEXT])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        "input[1]",
    )
    assert '"split"' in error["message"]
    told = ask(url, "/v1/classify", input=["short", TEXT], truncate=True).json()["data"]
    assert [each["truncated"] for each in told] == [False, True]


def test_each_model_does_its_own_task(url: str) -> None:
    listed = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
    assert {card["id"]: card["task"] for card in listed} == {
        GENERATOR: "generate",
        POOLER: "classify",
        DETECTOR: "classify",
    }
    assert httpx.get(f"{url}/ready", timeout=60).json() == {"status": "ready"}
    health = httpx.get(f"{url}/health", timeout=60).json()
    assert health["models"] == [GENERATOR, POOLER, DETECTOR]
    assert ask(url, "/v1/completions", prompt="a").json()["error"]["code"] == "wrong_task"
    refused = ask(url, "/v1/classify", input="a", model=GENERATOR)
    assert refused.json()["error"]["code"] == "wrong_task"
    assert ask(url, "/v1/completions", prompt="a", model=GENERATOR).is_success
