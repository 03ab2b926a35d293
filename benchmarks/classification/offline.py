"""The offline sweep: the cost of a text by the batch's size and layout.

- arrival: the stock pipeline on batches in order of arrival, each padded to its longest text;
- sorted: the same, with the texts sorted by length first;
- packed: this project's classifier, with the texts of a batch in one row without padding;
- lanes: the same with this project's device worker, where each compute thread takes a part.

All include tokenizing. The best time of the first three is the offline optimum that servers are
compared with; the best time of the last is the optimum with lanes.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.classification.designs import MAX_BATCHED_TOKENS, NO_LIMIT, stock_pipeline
from benchmarks.classification.table import Figures
from benchmarks.classification.texts import MIXED, SHORT, Lengths, make_texts
from deployments.compute.host_memory import keep_freed_memory
from deployments.contract.descriptions import Task
from deployments.contract.pooling import PoolingRequest
from deployments.pooling.device_worker import DeviceWorker
from deployments.pooling.lanes import choose_num_lanes
from deployments.pooling.model_loader import load_pooler
from deployments.pooling.pooling_model import PoolingModel
from deployments.pooling.request_queue import QueueLimits, RequestQueue, TokenIds
from deployments.pooling.text_encoder import TextEncoder

Run = Callable[[Sequence[str]], object]
Row = tuple[str, int, float, float, float, float]
"""Characters, batch size, and ms per text in each order."""
ORDERS = ("arrival", "sorted", "packed", "lanes")
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The results of the sweep.

    Attributes:
        figures: ms per text by batch size, length and order.
        optimum: The best rates on texts of mixed lengths.
    """

    figures: Figures
    optimum: "Optimum"


@dataclass(frozen=True, slots=True)
class Optimum:
    """Texts per second without a server.

    Attributes:
        rate: One batch after another, each on all threads.
        rate_in_lanes: With lanes: each thread runs its own batches.
    """

    rate: float
    rate_in_lanes: float


def sweep(folder: str, name: str, sizes: Sequence[int], num_texts: int, rounds: int) -> Sweep:
    """Run texts of both lengths in all batch sizes and orders, in alternating rounds."""
    rows = list[Row]()
    with our_runs(folder) as (packed, in_lanes):
        pipeline = stock_pipeline(folder)
        for lengths in (SHORT, MIXED):
            texts = make_texts(lengths, num_texts)
            ways: list[tuple[Run, list[str]]] = [
                (pipeline, texts),
                (pipeline, sorted(texts, key=len)),
                (packed, texts),
                (in_lanes, texts),
            ]
            for size in sizes:
                measured = [
                    [ms_per_text(run, ordered, size) for run, ordered in ways]
                    for _ in range(rounds)
                ]
                medians = map(statistics.median, zip(*measured, strict=True))
                rows.append((str(lengths), size, *medians))
    mixed = [row[2:] for row in rows if row[0] == str(MIXED)]
    one_batch = min(ms for *of_row, _ in mixed for ms in of_row)
    lanes = min(of_row[-1] for of_row in mixed)
    return Sweep(_figures(name, rows, num_texts), Optimum(1000 / one_batch, 1000 / lanes))


def _figures(name: str, rows: Sequence[Row], num_texts: int) -> Figures:
    one = {row[0]: row[2] for row in rows if row[1] == 1}
    columns = ("characters", "batch size", *(f"{order}, ms" for order in ORDERS))
    return Figures(
        "offline",
        f"(a) offline, {name}, {torch.get_num_threads()} threads, {num_texts} texts",
        (*columns, "lanes / arrival of 1"),
        [(*row, row[5] / one[row[0]] if row[0] in one else "-") for row in rows],
        (
            "milliseconds per text; arrival and sorted: the stock pipeline, packed: this project",
            "lanes: this project, each thread with a part of the batch",
        ),
    )


def ms_per_text(run: Run, texts: Sequence[str], size: int) -> float:
    """Run all texts in batches of this size; return milliseconds per text."""
    started = time.perf_counter()
    for i in range(0, len(texts), size):
        run(texts[i : i + size])
    return 1000 * (time.perf_counter() - started) / len(texts)


@contextmanager
def our_runs(
    folder: str, task: Task = "classify", dtype: str = "bfloat16"
) -> Iterator[tuple[Run, Run]]:
    """Yield this project's encoder and model without and with lanes, both warmed up."""
    with our_worker(folder, task, dtype) as ours:

        def run(texts: Sequence[str]) -> object:
            return ours.model(ours.encoded(texts)).tolist()

        def run_in_lanes(texts: Sequence[str]) -> object:
            with ours.queue.entered() as job:
                ours.queue.put(job, ours.encoded(texts))
                return job.answer.result()

        for warm_up in (run, run_in_lanes):
            warm_up(make_texts(Lengths(100, 101), 8))
        yield run, run_in_lanes


@dataclass(frozen=True, slots=True)
class OurWorker:
    """One of this project's models on its device worker, without a server.

    Attributes:
        model: The model, which the worker's lanes run.
        queue: What the worker takes its requests from.
        encoder: The model's own.
    """

    model: PoolingModel
    queue: RequestQueue
    encoder: TextEncoder

    def encoded(self, texts: Sequence[str]) -> tuple[TokenIds, ...]:
        """Return the tokens of each text."""
        (found,) = self.encoder.encode([PoolingRequest("offline", tuple(texts))])
        if isinstance(found, Exception):
            raise found
        return found.token_ids


@contextmanager
def our_worker(
    folder: str, task: Task = "classify", dtype: str = "bfloat16"
) -> Iterator[OurWorker]:
    """Run this project's worker until the block ends."""
    keep_freed_memory()
    loaded = load_pooler(
        folder,
        task=task,
        revision=None,
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=512,
    )
    num_threads = torch.get_num_threads()
    num_lanes = choose_num_lanes(loaded.model, torch.device("cpu"), num_threads)
    encoder = TextEncoder(loaded.tokenizer, loaded.max_model_len)
    model = PoolingModel(
        loaded.model,
        loaded.layout,
        loaded.probes.of_length(1),
        num_lanes,
        max_batched_tokens=MAX_BATCHED_TOKENS,
    )
    if model.layout != "packed":
        raise RuntimeError("the model could not be packed; the log says why")
    queue = RequestQueue(QueueLimits(NO_LIMIT, None))

    def place() -> PoolingModel:
        torch.set_num_threads(num_threads)  # a new thread takes the number that any thread set last
        return model

    worker = DeviceWorker(place, queue, lambda stats: None)

    worker.start().result()
    try:
        yield OurWorker(model, queue, encoder)
    finally:
        worker.stop()
