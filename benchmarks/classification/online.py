"""The online matrix: each design under 1 to 100 users, over HTTP on one small server.

A request is a text of 100 to 800 characters, sent as pieces of at most 300. A user sends the next
one when the previous one is answered. Every design runs behind the same server (`server`), without
Ray; while one is measured, the others are idle.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.classification.chart import Chart
from benchmarks.classification.designs import PIECES, RAYSTREAM, Design
from benchmarks.classification.http_client import fetch, sender, session
from benchmarks.classification.load import Latencies, closed_loop
from benchmarks.classification.table import Cell, Figures
from benchmarks.classification.texts import MIXED, make_texts, split
from benchmarks.free_port import free_port
from benchmarks.serving.processes import started

NUM_TEXTS = 512


@dataclass(frozen=True, slots=True)
class Window:
    """The durations of warm-up and measurement for each cell of the matrix, in seconds."""

    warm_up_s: float
    window_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one design with one number of users."""

    design: Design
    num_users: int
    latencies: Latencies
    mean_batch: float


@contextmanager
def servers(folder: str, logs: Path) -> Iterator[Mapping[str, str]]:
    """Run both servers while the block runs; yield their addresses by name."""
    with ExitStack() as stack:
        addresses = dict[str, str]()
        for name in ("baselines", "raystream"):
            addresses[name] = stack.enter_context(server(name, folder, logs))
        yield addresses


@contextmanager
def server(name: str, folder: str, logs: Path) -> Iterator[str]:
    """Run one of the two servers while the block runs; yield its address."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "benchmarks.classification.server", "--model", folder]
    command += ["--port", str(port), "--serve", name]
    with started(command, f"{address}/health", log=logs / f"{name}.log"):
        yield address


async def measure(
    addresses: Mapping[str, str],
    designs: Sequence[Design],
    users: Sequence[int],
    window: Window,
) -> list[Measured]:
    """Measure each design with each number of users."""
    texts = [split(text) for text in make_texts(MIXED, NUM_TEXTS)]
    async with session() as client:
        return [
            await _cell(client, addresses, design, num_users, texts, window)
            for num_users in users
            for design in designs
        ]


async def _cell(
    client: aiohttp.ClientSession,
    addresses: Mapping[str, str],
    design: Design,
    num_users: int,
    texts: Sequence[list[str]],
    window: Window,
) -> Measured:
    address = addresses["raystream" if design is RAYSTREAM else "baselines"]
    url = f"{address}/{design.path}"
    send = sender(client, f"{url}/classify", lambda i: {"texts": texts[i % len(texts)]})
    before = await fetch(client, f"{url}/counts")
    latencies = await closed_loop(
        send, num_users, warm_up_s=window.warm_up_s, window_s=window.window_s
    )
    after = await fetch(client, f"{url}/counts")
    calls, pieces = (after[key] - before[key] for key in ("calls", "pieces"))
    return Measured(design, num_users, latencies, pieces / calls)


def figures(measured: Sequence[Measured], model: str, window: Window) -> Figures:
    """Return the matrix as a table; its ratios are to one call per piece."""
    base = {each.num_users: each.latencies.rate for each in measured if each.design is PIECES}
    rows: list[Sequence[Cell]] = [
        (
            each.design.name,
            each.num_users,
            each.latencies.rate,
            each.latencies.percentile_ms(50),
            each.latencies.percentile_ms(95),
            each.mean_batch,
            each.latencies.rate / base[each.num_users] if base.get(each.num_users) else "-",
        )
        for each in measured
    ]
    return Figures(
        "online",
        f"(b) online, {model}, texts of {MIXED} characters in pieces",
        ("design", "users", "RPS", "p50, ms", "p95, ms", "mean batch", "RPS / pieces"),
        rows,
        (
            f"one server over HTTP, no Ray; windows of {window.window_s:g} s",
            "queue BATCH_SIZE_MAX BATCH_TIMEOUT; mean batch: pieces per call of the model",
        ),
    )


def charts(measured: Sequence[Measured]) -> dict[str, Chart]:
    """Return plots of requests per second, p50 and p95 over users, by file name."""
    pictures = {
        "online_rps": ("Requests per second", "requests/s"),
        "online_p50": ("Median latency", "p50, ms"),
        "online_p95": ("95th percentile of latency", "p95, ms"),
    }
    values = {
        "online_rps": lambda latencies: latencies.rate,
        "online_p50": lambda latencies: latencies.percentile_ms(50),
        "online_p95": lambda latencies: latencies.percentile_ms(95),
    }
    found = dict[str, Chart]()
    for name, (title, label) in pictures.items():
        lines = dict[str, list[tuple[float, float]]]()
        for each in measured:
            if each.latencies.samples_s:  # without samples there is nothing to draw
                point = (float(each.num_users), values[name](each.latencies))
                lines.setdefault(each.design.name, []).append(point)
        found[name] = Chart(f"{title} by users", "users", label, lines)
    return found
