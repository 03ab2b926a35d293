"""The committed detector, loaded by the plain Auto classes, as users load it."""

import hashlib
import json
from typing import Any

import pytest
import torch
from transformers import RobertaForSequenceClassification

from models.training.detector.architecture import MAX_TOKENS, normalised
from models.training.detector.detector import Detector
from models.training.detector.document import Label, Source, read_documents
from models.training.detector.evaluate import figure, long_text_figure, sample_of
from models.training.detector.pieces import MAX_CHARS, MIN_CHARS, Piece, read_pieces
from models.training.detector.train import MODEL_DIR

MAX_WEIGHT_BYTES = 8_000_000
PIECES = read_pieces(MODEL_DIR / "held_out.jsonl")
LONG_TEXTS = read_documents(MODEL_DIR / "long_texts.jsonl")
ROUNDING = 2
"""Pieces of the sample so close to 0.5 that another machine may round them to the other side."""


@pytest.fixture(scope="module")
def detector() -> Detector:
    return Detector(MODEL_DIR)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MODEL_DIR / "evaluation.json").read_text(encoding="utf-8"))
    return found


def test_the_weights_are_small_float32_of_a_stock_architecture(detector: Detector) -> None:
    assert isinstance(detector.model, RobertaForSequenceClassification)
    assert detector.model.dtype is torch.float32
    assert (MODEL_DIR / "model.safetensors").stat().st_size <= MAX_WEIGHT_BYTES
    assert detector.model.config.id2label == {0: "human", 1: "pydoc-chat"}


def test_the_evaluation_is_of_these_weights_and_meets_its_bound(report: dict[str, Any]) -> None:
    weights = (MODEL_DIR / "model.safetensors").read_bytes()
    assert report["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert report["all"]["asked"] == len(PIECES)
    assert report["all"]["right"] >= 0.9 * len(PIECES)
    assert report["without_recitals"]["share"] >= report["all"]["share"]


def test_a_sample_is_classified_as_in_the_evaluation(
    detector: Detector, report: dict[str, Any]
) -> None:
    again = figure(detector.predict(sample_of(PIECES)))
    assert again["asked"] == report["sample"]["asked"] >= 200
    assert abs(again["right"] - report["sample"]["right"]) <= ROUNDING


def test_long_texts_are_classified_as_in_the_evaluation(
    detector: Detector, report: dict[str, Any]
) -> None:
    for document, expected in zip(LONG_TEXTS, report["long_texts"], strict=True):
        again = long_text_figure(detector, document)
        assert abs(again["right"] - expected["right"]) <= 1
        is_chat = again["mean_chat_probability"] > 0.5
        assert is_chat == (document.source.label is Label.CHAT)


def test_the_held_out_pieces_are_balanced_bounded_and_normalised() -> None:
    labels = [piece.label for piece in PIECES]
    assert labels.count(Label.HUMAN) == labels.count(Label.CHAT)
    assert len({piece.text for piece in PIECES}) == len(PIECES)
    for piece in PIECES:
        assert MIN_CHARS <= len(piece.text) <= MAX_CHARS
        assert piece.text == normalised(piece.text)


def test_line_breaks_and_markup_change_no_prediction(detector: Detector) -> None:
    text = "Return the *name* of the current time zone. ``None`` means that it is unknown."
    plain = "Return the name of the current time zone. None means that it is unknown."
    first, second = detector.chat_probabilities([text.replace(" ", "\n   "), plain])
    assert first == pytest.approx(second, abs=1e-6)


def test_a_prediction_does_not_depend_on_its_batch(detector: Detector) -> None:
    pieces = PIECES[:20]
    together = [it.chat_probability for it in detector.predict(pieces)]
    alone = [detector.predict([piece])[0].chat_probability for piece in pieces]
    assert together == pytest.approx(alone, abs=1e-5)


def test_a_piece_of_the_most_tokens_is_classified(detector: Detector) -> None:
    piece = Piece("\U0001f600" * MAX_CHARS, Source.TOPIC, None, False)
    assert len(detector.tokenizer(piece.text)["input_ids"]) <= MAX_TOKENS
    assert 0 <= detector.predict([piece])[0].chat_probability <= 1


def test_the_folder_holds_exactly_the_expected_files() -> None:
    expected = {
        "README.md",
        "config.json",
        "evaluation.json",
        "held_out.jsonl",
        "long_texts.jsonl",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path.name for path in MODEL_DIR.iterdir()} == expected
