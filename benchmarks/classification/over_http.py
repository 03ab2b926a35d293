"""RoBERTa-base's shape over HTTP: this project as users run it, and a hand-made queue batcher.

This project runs with `serve run`, the shipped configuration and its proxy. The queue batcher runs
behind a small server, like its author's, with its author's final settings. Our replica behind the
same small server, without Ray, shows the cost of Ray and the ingress. The servers run one at a
time, in alternating rounds. A request is one text, and an item is a text.
"""

import asyncio
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.classification.designs import (
    CHOSEN_QUEUE_BATCHER,
    MAX_BATCHED_TOKENS,
    RAYSTREAM,
    Design,
)
from benchmarks.classification.http_client import Body, sender, session
from benchmarks.classification.load import Latencies, closed_loop
from benchmarks.classification.offline import Optimum
from benchmarks.classification.online import Window, server
from benchmarks.classification.table import Cell, Figures
from benchmarks.classification.texts import MIXED, make_texts
from benchmarks.free_port import free_port
from benchmarks.serving.processes import started

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_TEXTS = 512
GOAL_OF_BATCHER = 1.5
GOAL_OF_OPTIMUM = 0.9


@dataclass(frozen=True, slots=True)
class Target:
    """A running server: its URL for classification, and the body for a text."""

    url: str
    body: Callable[[str], Body]


@contextmanager
def raystream(folder: str, logs: Path) -> Iterator[Target]:
    """Run this project's complete application while the block runs."""
    address, name = f"http://127.0.0.1:{(port := free_port())}", Path(folder).name
    command = [sys.executable, "-m", "benchmarks.peers.serve_model", "--task", "classify"]
    command += ["--model", folder, "--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-batched-tokens", str(MAX_BATCHED_TOKENS)]
    with started(command, f"{address}/ready", log=logs / "serve_run.log", cwd=ROOT):
        yield Target(f"{address}/v1/classify", lambda text: {"model": name, "input": text})


@contextmanager
def queue_batcher(folder: str, logs: Path) -> Iterator[Target]:
    """Run the hand-made queue batcher while the block runs."""
    with server("baselines", folder, logs) as address:
        yield _on_small_server(address, CHOSEN_QUEUE_BATCHER)


@contextmanager
def replica_without_ray(folder: str, logs: Path) -> Iterator[Target]:
    """Run this project's replica without Ray while the block runs."""
    with server("raystream", folder, logs) as address:
        yield _on_small_server(address, RAYSTREAM)


def _on_small_server(address: str, design: Design) -> Target:
    return Target(f"{address}/{design.path}/classify", lambda text: {"texts": [text]})


SERVERS: Mapping[str, Callable[[str, Path], AbstractContextManager[Target]]] = {
    CHOSEN_QUEUE_BATCHER.name: queue_batcher,
    "raystream": raystream,
    "raystream, no Ray": replica_without_ray,
}


def measure(
    folder: str, logs: Path, num_users: int, window: Window, rounds: int, optimum: Optimum
) -> Figures:
    """Measure all servers in turn; return items per second and their ratio to the optimum."""
    found: dict[str, list[Latencies]] = {name: [] for name in SERVERS}
    for _ in range(rounds):
        for name, up in SERVERS.items():
            with up(folder, logs) as target:
                found[name].append(asyncio.run(_load(target, num_users, window)))
    return figures(found, Path(folder).name, num_users, optimum)


async def _load(target: Target, num_users: int, window: Window) -> Latencies:
    texts = make_texts(MIXED, NUM_TEXTS)
    async with session() as client:
        send = sender(client, target.url, lambda i: target.body(texts[i % len(texts)]))
        return await closed_loop(
            send, num_users, warm_up_s=window.warm_up_s, window_s=window.window_s
        )


def figures(
    found: Mapping[str, Sequence[Latencies]], model: str, num_users: int, optimum: Optimum
) -> Figures:
    """Return medians over the rounds, and each rate's ratio to the batcher and to the optimum."""
    rates = {name: statistics.median(each.rate for each in runs) for name, runs in found.items()}
    base = rates[CHOSEN_QUEUE_BATCHER.name]
    rows: list[Sequence[Cell]] = [
        (
            name,
            rates[name],
            statistics.median(each.percentile_ms(50) for each in runs),
            statistics.median(each.percentile_ms(95) for each in runs),
            rates[name] / base,
            rates[name] / optimum.rate,
            rates[name] / optimum.rate_in_lanes,
        )
        for name, runs in found.items()
    ]
    return Figures(
        "over_http",
        f"(d) {model}, bfloat16, texts of {MIXED} characters, {num_users} users over HTTP",
        ("design", "items/s", "p50, ms", "p95, ms", "/ batcher", "/ optimum", "/ in lanes"),
        rows,
        (
            f"offline optimum: {optimum.rate:.1f} items/s; in lanes: {optimum.rate_in_lanes:.1f}",
            "goals for raystream: "
            f"{GOAL_OF_BATCHER} times the batcher, {GOAL_OF_OPTIMUM} of the optimum",
        ),
    )
