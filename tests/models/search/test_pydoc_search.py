"""The committed model, loaded by sentence-transformers, as users load it."""

import hashlib
import json
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertModel

from models.training.search.architecture import HIDDEN, MATRYOSHKA_DIMENSIONS, MAX_TOKENS
from models.training.search.encoder import Encoder, Index
from models.training.search.entries import MODEL_DIR, load_entries, load_questions
from models.training.search.evaluate import BEST, figure

MAX_FOLDER_BYTES = 8_000_000
ENTRIES = load_entries()
ROUNDING = 2
"""Questions whose tenth entry another machine's rounding may exchange."""


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(MODEL_DIR)


@pytest.fixture(scope="module")
def index(encoder: Encoder) -> Index:
    return Index(encoder, ENTRIES)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MODEL_DIR / "evaluation.json").read_text(encoding="utf-8"))
    return found


def test_the_evaluation_is_of_these_weights_and_meets_its_bound(report: dict[str, Any]) -> None:
    weights = (MODEL_DIR / "model.safetensors").read_bytes()
    assert report["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert report["entries"] == len(ENTRIES)
    held_out = report["held_out"]
    assert held_out["model"]["recall_at_10"] >= 0.8
    assert held_out["model"]["found_in_10"] > held_out["bm25"]["found_in_10"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "file"), [("held_out", "held_out.jsonl"), ("hand_written", "questions.jsonl")]
)
def test_the_questions_find_as_many_entries_as_in_the_evaluation(
    index: Index, report: dict[str, Any], suite: str, file: str
) -> None:
    questions = load_questions(MODEL_DIR / file)
    ranking = index.best([it.question for it in questions], BEST)
    again = figure(questions, ranking, ENTRIES)
    expected = report[suite]["model"]
    assert again["asked"] == expected["asked"]
    assert abs(again["found_in_10"] - expected["found_in_10"]) <= ROUNDING


def test_the_card_tells_the_figures_of_the_evaluation(report: dict[str, Any]) -> None:
    card = (MODEL_DIR / "README.md").read_text(encoding="utf-8")
    for suite in ("held_out", "hand_written"):
        for row in ("model", "model_cut_to_32", "model_cut_to_64", "model_cut_to_96", "bm25"):
            found = report[suite][row]
            for count in (10, 3, 1):
                assert f"{100 * found[f'found_in_{count}'] / found['asked']:.1f}%" in card
        assert f"{report[suite]['recall_at_10_over_bm25']:.2f}" in card


def test_vectors_are_of_length_one_and_may_be_cut(encoder: Encoder) -> None:
    texts = ["how do I split a string at commas", "str.split"]
    whole = encoder.model.encode(texts, convert_to_tensor=True)
    assert whole.shape == (2, HIDDEN)
    torch.testing.assert_close(whole.norm(dim=1), torch.ones(2))
    for length in MATRYOSHKA_DIMENSIONS:
        cut = torch.nn.functional.normalize(whole[:, :length], dim=1)
        torch.testing.assert_close(cut, Encoder(MODEL_DIR, length).embed(texts))


def test_the_plain_auto_classes_give_the_same_vectors(encoder: Encoder) -> None:
    text = "remove a directory and everything in it"
    model: Any = AutoModel.from_pretrained(MODEL_DIR)
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL_DIR)
    assert isinstance(model, BertModel)
    assert model.dtype is torch.float32
    assert len(tokenizer("word " * 2 * MAX_TOKENS)["input_ids"]) > 2 * MAX_TOKENS
    with torch.inference_mode():
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
    mean = torch.nn.functional.normalize(hidden.mean(dim=1), dim=1)
    torch.testing.assert_close(mean, encoder.embed([text]), atol=1e-5, rtol=0)


def test_a_vector_does_not_depend_on_its_batch(encoder: Encoder) -> None:
    texts = [entry.text for entry in ENTRIES[:50]]
    alone = torch.cat([encoder.embed([text]) for text in texts])
    torch.testing.assert_close(encoder.embed(texts), alone, atol=1e-5, rtol=0)


def test_a_text_that_is_too_long_loses_its_end(encoder: Encoder) -> None:
    assert encoder.model.max_seq_length == MAX_TOKENS
    words = ["word"] * MAX_TOKENS
    vectors = encoder.embed([" ".join(words), " ".join([*words, "end"])])
    torch.testing.assert_close(vectors[0], vectors[1])


def test_the_folder_holds_exactly_the_expected_files_and_is_small() -> None:
    paths = [path for path in MODEL_DIR.rglob("*") if path.is_file()]
    assert {str(path.relative_to(MODEL_DIR)) for path in paths} == {
        "1_Pooling/config.json",
        "README.md",
        "config.json",
        "config_sentence_transformers.json",
        "entries.jsonl",
        "evaluation.json",
        "held_out.jsonl",
        "model.safetensors",
        "modules.json",
        "questions.jsonl",
        "sentence_bert_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in paths) <= MAX_FOLDER_BYTES
