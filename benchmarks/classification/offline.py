"""The offline sweep: what a text costs by the size of its batch, and by how it is laid out.

- in arrival order: the stock pipeline on batches as they come, each padded to its longest text;
- sorted: the same, the texts sorted by length first;
- packed: this project's classifier, the texts of a batch behind one another without padding.

Tokenizing is in all three. The least of a column is the offline optimum that servers are held
against.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.classification.designs import stock_pipeline
from benchmarks.classification.table import Figures
from benchmarks.classification.texts import MIXED, SHORT, Lengths, make_texts
from deployments.classifier.model_loader import load_classifier
from deployments.classifier.sequence_classifier import SequenceClassifier
from deployments.classifier.text_encoder import TextEncoder
from deployments.contract import ClassificationRequest
from deployments.engine.cpu.allocator import keep_freed_memory

Run = Callable[[Sequence[str]], object]
ORDERS = ("arrival", "sorted", "packed")
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What the sweep has measured.

    Attributes:
        figures: ms a text by batch size, length and order.
        optimum_rate: Texts per second of the fastest way through texts of mixed lengths.
    """

    figures: Figures
    optimum_rate: float


def sweep(folder: str, name: str, sizes: Sequence[int], num_texts: int, rounds: int) -> Sweep:
    """Run texts of both lengths through all batch sizes and orders, rounds alternating."""
    pipeline, packed = stock_pipeline(folder), packed_run(folder)
    rows = list[tuple[str, int, float, float, float]]()
    for lengths in (SHORT, MIXED):
        texts = make_texts(lengths, num_texts)
        ways: list[tuple[Run, list[str]]] = [
            (pipeline, texts),
            (pipeline, sorted(texts, key=len)),
            (packed, texts),
        ]
        for size in sizes:
            measured = [
                [ms_per_text(run, ordered, size) for run, ordered in ways] for _ in range(rounds)
            ]
            arrival, by_length, no_padding = map(statistics.median, zip(*measured, strict=True))
            rows.append((str(lengths), size, arrival, by_length, no_padding))
    best = min(ms for row in rows if row[0] == str(MIXED) for ms in row[2:])
    return Sweep(_figures(name, rows, num_texts), 1000 / best)


def _figures(
    name: str, rows: Sequence[tuple[str, int, float, float, float]], num_texts: int
) -> Figures:
    one = {row[0]: row[2] for row in rows if row[1] == 1}
    columns = ("characters", "batch size", *(f"{order}, ms" for order in ORDERS))
    return Figures(
        "offline",
        f"(a) offline, {name}, {torch.get_num_threads()} threads, {num_texts} texts",
        (*columns, "packed / arrival of 1"),
        [(*row, row[4] / one[row[0]] if row[0] in one else "-") for row in rows],
        ("milliseconds a text; arrival and sorted: the stock pipeline, packed: this project",),
    )


def ms_per_text(run: Run, texts: Sequence[str], size: int) -> float:
    """Run all texts in batches of this size; return milliseconds per text."""
    started = time.perf_counter()
    for i in range(0, len(texts), size):
        run(texts[i : i + size])
    return 1000 * (time.perf_counter() - started) / len(texts)


def packed_run(folder: str) -> Run:
    """Return this project's encoder and classifier as one function, warmed up."""
    keep_freed_memory()
    loaded = load_classifier(
        folder,
        revision=None,
        dtype="bfloat16",
        device=torch.device("cpu"),
        max_model_len=512,
    )
    encoder = TextEncoder(loaded.tokenizer, loaded.max_model_len)
    classifier = SequenceClassifier(loaded.model, loaded.layout, loaded.probes.of_length(1))
    if classifier.layout != "packed":
        raise RuntimeError("the model could not be packed; the log says why")

    def run(texts: Sequence[str]) -> object:
        (encoded,) = encoder.encode([ClassificationRequest("offline", tuple(texts))])
        if isinstance(encoded, Exception):
            raise encoded
        return classifier(encoded.token_ids).tolist()

    run(make_texts(Lengths(100, 101), 2))
    return run
