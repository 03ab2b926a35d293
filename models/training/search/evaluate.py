"""Evaluates the saved pydoc-search: ``python -m models.training.search.evaluate``.

Asks the held-out questions and the hand-written ones (``questions.jsonl``) of the index of all
entries, through sentence-transformers, prints the figures and writes them to ``evaluation.json``
beside the weights. Training has seen none of these questions, and nothing of the held-out
entries.
"""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import sentence_transformers
import torch

from models.training.command_line import folder_argument, write_evaluation
from models.training.detector.human_documents import shingles, words_of
from models.training.search.architecture import HIDDEN, MATRYOSHKA_DIMENSIONS
from models.training.search.bm25 import Bm25, terms
from models.training.search.encoder import Encoder, Index
from models.training.search.entries import (
    MODEL_DIR,
    Entry,
    Question,
    load_entries,
    load_questions,
)
from models.training.search.train import NUM_THREADS

BEST: Final = 10
MAX_FAILURES_SHOWN: Final = 20
Figure = dict[str, float | int]
Ranking = list[list[int]]


def figure(questions: Sequence[Question], ranking: Ranking, entries: Sequence[Entry]) -> Figure:
    """Count the questions with a right entry among the best 10, the best 3, and as the best."""
    found: Figure = {"asked": len(questions)}
    for count in (BEST, 3, 1):
        hits = sum(
            is_found(question, best[:count], entries)
            for question, best in zip(questions, ranking, strict=True)
        )
        found[f"found_in_{count}"] = hits
        found[f"recall_at_{count}"] = round(hits / len(questions), 4)
    return found


def is_found(question: Question, best: Sequence[int], entries: Sequence[Entry]) -> bool:
    """Return whether one of the entries answers the question."""
    return any(entries[index].name in question.names for index in best)


def names_its_entry(question: Question) -> bool:
    """Return whether a word of the question is the last part of its entry's name."""
    last_parts = {term for name in question.names for term in terms(name.rpartition(".")[2])}
    return not last_parts.isdisjoint(terms(question.question))


def repeats_training(questions: Sequence[Question], entries: Sequence[Entry]) -> list[bool]:
    """Return for each question whether it has eight words in a row of a trained entry's summary.

    Twins such as ``str.isupper`` and ``bytes.isupper`` may stand on both sides.
    """
    learned = [words_of(it.summary) for it in entries if not it.is_held_out]
    known = {shingle for words in learned for shingle in shingles(words)}
    return [not known.isdisjoint(shingles(words_of(it.question))) for it in questions]


def compare(folder: Path, questions: Sequence[Question]) -> dict[str, Any]:
    """Return the figures of the model in a folder, at all lengths, and of BM25."""
    entries = load_entries()
    texts = [it.question for it in questions]
    shown: dict[str, Any] = {}
    ranking: Ranking = []
    for length in reversed(MATRYOSHKA_DIMENSIONS):
        found = Index(Encoder(folder, length), entries).best(texts, BEST)
        if length == HIDDEN:
            ranking = found
            shown["model"] = figure(questions, found, entries)
        else:
            shown[f"model_cut_to_{length}"] = figure(questions, found, entries)
    bm25 = Bm25([entry.text for entry in entries])
    shown["bm25"] = figure(questions, [bm25.best(text, BEST) for text in texts], entries)
    ratio = shown["model"][f"found_in_{BEST}"] / shown["bm25"][f"found_in_{BEST}"]
    shown["recall_at_10_over_bm25"] = round(ratio, 3)
    for name, is_left_out in (
        ("model_where_no_word_is_of_the_name", map(names_its_entry, questions)),
        ("model_where_no_trained_summary_is_repeated", repeats_training(questions, entries)),
    ):
        kept = [index for index, is_out in enumerate(is_left_out) if not is_out]
        shown[name] = figure(
            [questions[index] for index in kept], [ranking[index] for index in kept], entries
        )
    failed = [
        {"asked": it.question, "right": list(it.names), "best": entries[best[0]].name}
        for it, best in zip(questions, ranking, strict=True)
        if not is_found(it, best, entries)
    ]
    return {**shown, "failures": failed[:MAX_FAILURES_SHOWN]}


def evaluate(folder: Path) -> dict[str, Any]:
    """Return all figures for the model in a folder, on the questions of the committed folder."""
    started = time.perf_counter()
    return {
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "method": "cosine with the text of every entry; found: a right entry is among the best",
        "entries": len(load_entries()),
        "held_out": compare(folder, load_questions(MODEL_DIR / "held_out.jsonl")),
        "hand_written": compare(folder, load_questions(MODEL_DIR / "questions.jsonl")),
        "torch": torch.__version__,
        "sentence_transformers": sentence_transformers.__version__,
        "seconds": round(time.perf_counter() - started),
    }


def main() -> None:
    """Evaluate, print, and write evaluation.json."""
    folder = folder_argument(__doc__, MODEL_DIR, NUM_THREADS)
    write_evaluation(evaluate(folder), folder)


if __name__ == "__main__":
    main()
