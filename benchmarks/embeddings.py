"""Embeddings over HTTP, compared with the same model in packed batches without a server.

The model has MiniLM-L6's shape and random weights. A closed loop of users sends texts of 100 to 800
characters, one or several a request. The server stays up while batches run without it, and rounds
take turns, since machines are noisy. Without a server, batches of 32 texts run one after the other,
each on all compute threads, or in lanes, as the server's do.

Run: python -m benchmarks.embeddings [--users 32] [--texts 1,8] [--rounds 3] [--window 10]
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertModel

from benchmarks.classification.beside import WARM_UP_S, serving
from benchmarks.classification.http_client import sender, session
from benchmarks.classification.load import closed_loop
from benchmarks.classification.offline import Run, ms_per_text, our_runs
from benchmarks.classification.shapes import MAX_MODEL_LEN, byte_level_tokenizer
from benchmarks.classification.texts import MIXED, make_texts
from benchmarks.serving.old_checkout import ROOT

NAME = "minilm-l6-random"
BATCH_SIZE = 32
NUM_TEXTS = 256
GOAL = 0.95


@dataclass(frozen=True, slots=True)
class Round:
    """Texts a second in one round.

    Attributes:
        packed: Without a server, one batch after the other.
        in_lanes: Without a server, in lanes.
        over_http: By the texts of a request.
    """

    packed: float
    in_lanes: float
    over_http: dict[int, float]


def build(parent: Path) -> Path:
    """Save the model and its tokenizer; return their folder.

    Source: config.json of sentence-transformers/all-MiniLM-L6-v2
    """
    config = BertConfig(
        vocab_size=30_522,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=MAX_MODEL_LEN,
        pad_token_id=1,  # the tokenizer's
    )
    torch.manual_seed(0)
    folder = parent / NAME
    BertModel(config).save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


async def over_http(port: int, num_users: int, num_texts: int, window_s: float) -> float:
    """Return how many texts a second a server embeds.

    Args:
        port: The server's.
        num_users: How many send requests, each as soon as its last one is answered.
        num_texts: Texts of a request.
        window_s: How long it is measured, in seconds.

    Raises:
        RuntimeError: No answer came within the window.
    """
    texts = make_texts(MIXED, NUM_TEXTS)

    def body(number: int) -> dict[str, object]:
        first = number * num_texts
        return {
            "model": NAME,
            "input": [texts[i % NUM_TEXTS] for i in range(first, first + num_texts)],
        }

    async with session() as client:
        send = sender(client, f"http://127.0.0.1:{port}/v1/embeddings", body)
        found = await closed_loop(send, num_users, warm_up_s=WARM_UP_S, window_s=window_s)
    if not found.samples_s:
        raise RuntimeError(f"no answer came within {window_s:g} s: choose a longer --window")
    return num_texts * found.rate


def measure(
    folder: Path, dtype: str, num_users: int, sizes: Sequence[int], rounds: int, window_s: float
) -> list[Round]:
    """Measure with and without a server, by turns."""
    texts = make_texts(MIXED, NUM_TEXTS)

    def rate(run: Run) -> float:
        return 1000 / ms_per_text(run, texts, BATCH_SIZE)

    with (
        serving("raystream", ROOT, folder, dtype, task="embed") as server,
        our_runs(str(folder), "embed", dtype) as (packed, in_lanes),
    ):
        return [
            Round(
                rate(packed),
                rate(in_lanes),
                {
                    size: asyncio.run(over_http(server.port, num_users, size, window_s))
                    for size in sizes
                },
            )
            for _ in range(rounds)
        ]


def table(rounds: Sequence[Round], dtype: str, num_users: int) -> Table:
    """Return medians of the rates and of the rounds' ratios."""
    made = Table(title=f"{NAME}, {dtype}, texts of {MIXED} characters, {num_users} users over HTTP")
    made.caption = f"goal with one text a request: {GOAL} of the packed batches"
    for column in ("texts a request", "texts/s", "packed", "/ packed", "in lanes", "/ in lanes"):
        made.add_column(column, justify="right")
    packed = statistics.median(each.packed for each in rounds)
    in_lanes = statistics.median(each.in_lanes for each in rounds)
    for size in rounds[0].over_http:
        rate = statistics.median(each.over_http[size] for each in rounds)
        of_packed = statistics.median(each.over_http[size] / each.packed for each in rounds)
        of_lanes = statistics.median(each.over_http[size] / each.in_lanes for each in rounds)
        made.add_row(
            str(size),
            *(f"{rate:.1f}", f"{packed:.1f}", f"{of_packed:.2f}"),
            *(f"{in_lanes:.1f}", f"{of_lanes:.2f}"),
        )
    return made


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--texts", default="1,8", help="texts of a request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=10.0, help="seconds of one measurement")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    sizes = [int(each) for each in options.texts.split(",")]
    with TemporaryDirectory() as parent:
        folder = build(Path(parent))
        rounds = measure(
            folder, options.dtype, options.users, sizes, options.rounds, options.window
        )
    Console().print(table(rounds, options.dtype, options.users))


if __name__ == "__main__":
    main()
