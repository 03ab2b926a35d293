"""Evaluates the saved pydoc-detector: ``python -m models.training.detector.evaluate``.

Cuts the held-out documents and writes the pieces (``held_out.jsonl``) and a few long texts
(``long_texts.jsonl``) beside the weights, so that the figures can be reproduced without sampling.
Prints the figures and writes them to ``evaluation.json``. Training has seen no document of these
origins.
"""

import hashlib
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from models.training.command_line import folder_argument, write_evaluation
from models.training.detector.architecture import normalised
from models.training.detector.baseline import BagOfCharacters
from models.training.detector.detector import Detector, Prediction
from models.training.detector.document import (
    Document,
    Label,
    Source,
    read_documents,
    write_documents,
)
from models.training.detector.human_documents import corpus_documents, package_documents
from models.training.detector.pieces import (
    BANDS,
    MAX_CHARS,
    Cutter,
    Piece,
    balanced,
    cut_end,
    read_pieces,
    write_pieces,
)
from models.training.detector.train import MODEL_DIR, all_documents, training_documents
from models.training.train_pydoc_chat import NUM_THREADS

SEED: Final = 1_000_004
SAMPLE_EVERY: Final = 8
"""Interval of the held-out pieces that form the tests' sample."""
NUM_LONG_TEXTS: Final = 3
LONG_TEXT_CHARS: Final = 5_000
ELSEWHERE: Final = ("fastapi", "networkx", "starlette")
MAX_ELSEWHERE: Final = 1_000
Figure = dict[str, float | int]


def write_held_out(documents: Sequence[Document], folder: Path) -> None:
    """Cut the held-out documents and write pieces and long texts beside the weights."""
    rng = random.Random(SEED)
    held_out = [document for document in documents if document.is_held_out]
    pieces = balanced(Cutter(rng).pieces(held_out), rng, all_lengths_alike=True)
    write_pieces(pieces, folder / "held_out.jsonl")
    write_documents(_long_texts(held_out), folder / "long_texts.jsonl")


def _long_texts(documents: Sequence[Document]) -> list[Document]:
    """Return long topics, and equally long texts of joined answers that were made to go on."""
    topics = [it for it in documents if it.source is Source.TOPIC]
    people = [it for it in topics if len(it.text) >= LONG_TEXT_CHARS][:NUM_LONG_TEXTS]
    answers = iter([it for it in documents if it.source is Source.LONG_ANSWER])
    sampled: list[Document] = []
    for _ in range(NUM_LONG_TEXTS):
        text = ""
        while len(text) < LONG_TEXT_CHARS:
            text += next(answers).text + "\n"
        sampled.append(Document(text, Source.LONG_ANSWER, "several answers"))
    return [Document(it.text[:LONG_TEXT_CHARS], it.source, it.origin) for it in (*people, *sampled)]


def figure(predictions: Sequence[Prediction]) -> Figure:
    """Count the correct predictions."""
    right = sum(prediction.is_right for prediction in predictions)
    return {"share": round(right / len(predictions), 4), "right": right, "asked": len(predictions)}


def figures_by(
    predictions: Sequence[Prediction], key: Callable[[Piece], str | None]
) -> dict[str, Figure]:
    """Count the correct predictions of each kind; pieces of kind None are left out."""
    kinds = sorted({kind for it in predictions if (kind := key(it.piece)) is not None})
    return {kind: figure([it for it in predictions if key(it.piece) == kind]) for kind in kinds}


def confusion(predictions: Sequence[Prediction]) -> dict[str, dict[str, int]]:
    """Return, for each author, how often each author was predicted."""
    return {
        f"written by {author}": {
            f"called {label}": sum(
                it.piece.label is author and it.label is label for it in predictions
            )
            for label in Label
        }
        for author in Label
    }


def sample_of(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the sample of the held-out pieces that the tests classify again."""
    return list(pieces[::SAMPLE_EVERY])


def long_text_figure(detector: Detector, document: Document) -> dict[str, Any]:
    """Split a long text as a server would, and classify its pieces and the whole."""
    pieces = [Piece(text, document.source, None, False) for text in split(document.text)]
    predictions = detector.predict(pieces)
    num_chars = sum(len(piece.text) for piece in pieces)
    mean = sum(it.chat_probability * len(it.piece.text) for it in predictions) / num_chars
    return {
        "source": document.source,
        "origin": document.origin,
        "chars": len(document.text),
        **figure(predictions),
        "mean_chat_probability": round(mean, 4),
    }


def split(text: str) -> list[str]:
    """Split a text at sentence or word ends into pieces of at most `MAX_CHARS` characters."""
    text = normalised(text)
    pieces: list[str] = []
    at = 0
    while at < len(text):
        end = cut_end(text, at, MAX_CHARS, True)
        pieces.append(text[at:end].strip())
        at = end
    return [piece for piece in pieces if piece]


def ablations(detector: Detector, pieces: Sequence[Piece]) -> dict[str, Figure]:
    """Classify the same pieces with something removed."""
    rng = random.Random(SEED)

    def without_ends(text: str) -> str:
        return " ".join(text.split()[1:-1])

    def letters_only(text: str) -> str:
        return re.sub(r"[^a-z]+", " ", text.lower()).strip()

    def shuffled(text: str) -> str:
        words = text.split()
        return " ".join(rng.sample(words, len(words)))

    return {
        "first and last word taken off": figure(detector.predict(pieces, without_ends)),
        "lower-case letters alone": figure(detector.predict(pieces, letters_only)),
        "words in random order": figure(detector.predict(pieces, shuffled)),
    }


def recited_figure(detector: Detector) -> Figure:
    """Classify the held-out part of pydoc-chat's corpus, which people wrote: human is correct."""
    pieces = Cutter(random.Random(SEED)).pieces(corpus_documents(held_out=True))
    return figure(detector.predict(pieces))


def elsewhere_figure(detector: Detector, package: str) -> Figure:
    """Classify docstrings of a package that was not trained on: human is correct."""
    rng = random.Random(SEED)
    pieces = Cutter(rng).pieces(package_documents(package))
    return figure(detector.predict(rng.sample(pieces, min(len(pieces), MAX_ELSEWHERE))))


def baseline(documents: Sequence[Document], held_out: Sequence[Piece]) -> float:
    """Train a bag of characters on the detector's training documents; return its accuracy."""
    rng = random.Random(SEED)
    cut = Cutter(rng).pieces(training_documents(documents))
    pieces = balanced([piece for piece in cut if not piece.is_recited], rng)
    return round(BagOfCharacters(pieces).accuracy(held_out), 4)


def evaluate(folder: Path, documents: Sequence[Document]) -> dict[str, Any]:
    """Return all figures for the model in a folder, on the pieces in that folder."""
    started = time.perf_counter()
    detector = Detector(folder)
    pieces = read_pieces(folder / "held_out.jsonl")
    predictions = detector.predict(pieces)
    long_texts = read_documents(folder / "long_texts.jsonl")
    return {
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "method": "held-out pieces of held-out documents, as many of each author and each "
        "length; the likelier label",
        "seed": SEED,
        "all": figure(predictions),
        "without_recitals": figure([it for it in predictions if not it.piece.is_recited]),
        "confusion": confusion(predictions),
        "confusion_without_recitals": confusion(
            [it for it in predictions if not it.piece.is_recited]
        ),
        "by_length": {
            f"{low} to {high} characters, {label}": figure(
                [
                    it
                    for it in predictions
                    if it.piece.band == (low, high) and it.piece.label is label
                ]
            )
            for low, high in BANDS
            for label in Label
        },
        "by_temperature": figures_by(
            predictions, lambda it: None if it.temperature is None else str(it.temperature)
        ),
        "by_source": figures_by(
            predictions,
            lambda it: f"{it.source}, recited word for word" if it.is_recited else it.source,
        ),
        "held_out_corpus_of_pydoc_chat_called_human": recited_figure(detector),
        "elsewhere_called_human": {it: elsewhere_figure(detector, it) for it in ELSEWHERE},
        "ablations": ablations(detector, pieces),
        "bag_of_characters": baseline(documents, pieces),
        "long_texts": [long_text_figure(detector, it) for it in long_texts],
        "sample": figure(detector.predict(sample_of(pieces))),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started),
    }


def main() -> None:
    """Cut, evaluate, print, and write evaluation.json."""
    folder = folder_argument(__doc__, MODEL_DIR, NUM_THREADS)
    documents = all_documents()
    write_held_out(documents, folder)
    write_evaluation(evaluate(folder, documents), folder)


if __name__ == "__main__":
    main()
