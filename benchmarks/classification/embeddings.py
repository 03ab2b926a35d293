"""Embeddings over HTTP, compared with packed batches and sentence-transformers without a server.

The model has random weights; all sides pool by the mean. A request is one text, as searches send
them, or several, as indexing does; answers are in base64. With `--infinity`, infinity-emb serves
the same model in the same type to the same users.
"""

import asyncio
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from sentence_transformers import SentenceTransformer

from benchmarks.classification.http_client import sender, session
from benchmarks.classification.load import Latencies, closed_loop
from benchmarks.classification.offline import Run, ms_per_text, our_runs
from benchmarks.classification.online import Window
from benchmarks.classification.table import Cell, Figures
from benchmarks.classification.texts import MIXED, make_texts
from benchmarks.free_port import free_port
from benchmarks.processes import started

ROOT = Path(__file__).resolve().parent.parent.parent
DTYPE = "float32"
NUM_TEXTS = 512
BATCH_SIZES = (32, 128)
THEIR_BATCH_SIZE = 32
"""sentence-transformers' default."""
TEXTS_PER_REQUEST = (1, 8, 32)
GOAL = 0.9
"""Of the packed batches' throughput, over HTTP."""

PACKED, THEIRS = "packed in lanes, no server", "sentence-transformers, no server"


@contextmanager
def raystream(folder: str, logs: Path) -> Iterator[str]:
    """Run this project's complete application; yield the URL of its embeddings."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "benchmarks.peers.serve_model", "--task", "embed"]
    command += ["--model", folder, "--port", str(port), "--dtype", DTYPE]
    with started(command, f"{address}/ready", log=logs / "serve_run_embed.log", cwd=ROOT):
        yield f"{address}/v1/embeddings"


@contextmanager
def infinity(program: str, folder: str, logs: Path) -> Iterator[str]:
    """Run infinity-emb, from an environment of its own; yield the URL of its embeddings."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [program, "v2", "--model-id", folder, "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", DTYPE, "--engine", "torch", "--served-model-name", Path(folder).name]
    with started(command, f"{address}/health", log=logs / "infinity.log"):
        yield f"{address}/embeddings"


def measure(
    folder: str, logs: Path, num_users: int, window: Window, rounds: int, program: str | None
) -> Figures:
    """Measure all sides in turn; return texts per second, and ratios to the two baselines.

    Args:
        folder: The model.
        logs: The folder of the servers' logs.
        num_users: Users at once; each sends its next text when it has an answer.
        window: How long each server is measured.
        rounds: How often all are measured.
        program: infinity-emb's; None leaves it out.
    """
    servers: dict[str, Callable[[], AbstractContextManager[str]]] = {
        "raystream": partial(raystream, folder, logs)
    }
    if program is not None:
        servers["infinity-emb"] = partial(infinity, program, folder, logs)
    offline = dict[str, list[float]]()
    online = dict[tuple[str, int], list[Latencies]]()
    for _ in range(rounds):
        for name, rate in _offline_rates(folder):
            offline.setdefault(name, []).append(rate)
        for name, up in servers.items():
            with up() as url:
                for size in TEXTS_PER_REQUEST:
                    found = asyncio.run(_load(url, folder, num_users, window, size))
                    online.setdefault((name, size), []).append(found)
    return _figures(Path(folder).name, num_users, offline, online)


def _offline_rates(folder: str) -> Iterator[tuple[str, float]]:
    texts = make_texts(MIXED, NUM_TEXTS)
    with our_runs(folder, "embed", DTYPE) as (_, in_lanes):
        yield PACKED, max(_rate(in_lanes, texts, size) for size in BATCH_SIZES)
    model = SentenceTransformer(folder, device="cpu")

    def encode(batch: Sequence[str]) -> object:
        return model.encode(list(batch), batch_size=THEIR_BATCH_SIZE, show_progress_bar=False)

    encode(texts[:THEIR_BATCH_SIZE])
    yield THEIRS, _rate(encode, texts, len(texts))  # it sorts all texts by length


def _rate(run: Run, texts: Sequence[str], size: int) -> float:
    return 1000 / ms_per_text(run, texts, size)


async def _load(url: str, folder: str, num_users: int, window: Window, size: int) -> Latencies:
    texts, name = make_texts(MIXED, NUM_TEXTS), Path(folder).name
    parts = [texts[at : at + size] for at in range(0, len(texts), size)]
    async with session() as client:
        send = sender(
            client,
            url,
            lambda i: {"model": name, "input": parts[i % len(parts)], "encoding_format": "base64"},
        )
        return await closed_loop(
            send, num_users, warm_up_s=window.warm_up_s, window_s=window.window_s
        )


def _figures(
    model: str,
    num_users: int,
    offline: Mapping[str, Sequence[float]],
    online: Mapping[tuple[str, int], Sequence[Latencies]],
) -> Figures:
    rates = {name: statistics.median(found) for name, found in offline.items()}

    def row(name: str, rate: float, size: Cell, p50: Cell, p95: Cell) -> Sequence[Cell]:
        return (name, size, rate, p50, p95, rate / rates[PACKED], rate / rates[THEIRS])

    rows = [row(name, rate, "-", "-", "-") for name, rate in rates.items()]
    for (name, size), runs in online.items():
        rate = size * statistics.median(each.rate for each in runs)
        p50, p95 = (
            statistics.median(each.percentile_ms(percent) for each in runs) for percent in (50, 95)
        )
        rows.append(row(name, rate, size, p50, p95))
    columns = (
        *("side", "texts a request", "texts/s", "p50, ms", "p95, ms"),
        *("/ packed", "/ sentence-transformers"),
    )
    return Figures(
        "embeddings",
        f"(e) {model}, {DTYPE}, texts of {MIXED} characters, {num_users} users over HTTP",
        columns,
        rows,
        (f"goal for raystream: {GOAL} of the packed batches",),
    )
