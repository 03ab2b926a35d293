"""What metrics cost: a server with them against one without, and a thousand scrapes a minute.

Both servers run this checkout's code and serve a random model of 3 million parameters as `make
serve` does; in one of them, replica and ingress record nothing and tell Ray nothing. Rounds
alternate, as in `benchmarks.streaming`, which also says what the figures are; and so does which
server is started first. Then one is scraped, without other load; the CPU time of all its processes
is compared with that of as many requests that do nothing, and of none.

Run: python -m benchmarks.metrics [--streams 32] [--rounds 5]
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

from fastapi import FastAPI
from ray.serve import Application
from rich.console import Console

from benchmarks.old_checkout import ROOT
from benchmarks.pairs import compared
from benchmarks.streaming import (
    FIGURES,
    MODEL,
    NUM_REQUESTS,
    Prompts,
    Round,
    Server,
    cpu_s,
    measure,
    serving,
)
from benchmarks.three_million import save_three_million
from deployments import text_generator
from deployments.contract.metric_store import Counter
from deployments.generator.placed_engine import PlacedEngine
from deployments.text_generator import TextGenerator
from serve_app import app
from serve_app.config import AppConfig
from serve_app.http.request_record import RequestRecord
from serve_app.ingress import Ingress
from serve_app.metrics import IngressMetrics

SCRAPES_PER_S: Final = 1000 / 60
SCRAPING_S: Final = 20
NUM_SCRAPINGS: Final = 2
GOAL: Final = 0.02
"""The most that metrics may cost of a token's CPU time."""
SCRAPE_GOAL: Final = 0.01
"""The most of a core that a thousand scrapes a minute may take."""


class _Silence:
    """Takes every call and does nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return self._ignore

    def _ignore(self, *_: object, **__: object) -> None: ...


class SilentGenerator(TextGenerator):
    """Records nothing."""

    def _start(self) -> PlacedEngine:
        placed = super()._start()
        self._ray_metrics.close()
        silence: Any = _Silence()
        self._metrics = silence
        patch.object(text_generator, "StreamClock", _Silence).start()  # in this process
        return placed


class SilentMetrics(IngressMetrics):
    """Counts no tokens."""

    def count_prompt(self, record: RequestRecord, num_tokens: int) -> None:
        """Count nothing."""

    def delivered_tokens(self, record: RequestRecord) -> Counter:
        """Return a counter that counts nothing."""
        silence: Any = _Silence()
        counter: Counter = silence
        return counter


class SilentIngress(Ingress):
    """Records nothing."""

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application, with metrics that count nothing."""
        self._ray_metrics.close()
        self._parts = replace(self._parts, metrics=SilentMetrics())
        return super().__serve_build_asgi_app__()


def build_silent(args: AppConfig) -> Application:
    """Compose the shipped graph with processes that record nothing."""
    with (
        patch.object(app, "TextGenerator", SilentGenerator),
        patch.object(app, "Ingress", SilentIngress),
    ):
        return app.build(args)


Pairs = list[tuple[Round, Round]]
"""Rounds with metrics and without, side by side."""


def compare(
    servers: tuple[Server, Server], prompts: Prompts, num_streams: int, num_rounds: int
) -> Pairs:
    """Measure by turns, and return the rounds of both servers."""
    pairs = []
    for turn in range(num_rounds + 1):  # the first warms both up
        order = servers if turn % 2 else servers[::-1]
        num_requests = NUM_REQUESTS.get(num_streams, 4 * num_streams)
        rounds = {s: measure(s, prompts.requests(num_requests), num_streams) for s in order}
        pairs.append((rounds[servers[0]], rounds[servers[1]]))
    return pairs[1:]


def report(pairs: Pairs) -> None:
    """Print each figure with metrics, without, and the rounds' median ratio."""
    for figure, value in FIGURES.items():
        with_them, without, ratio = compared((value(a), value(b)) for a, b in pairs)
        low, *_, high = statistics.quantiles([value(a) / value(b) for a, b in pairs], n=4)
        Console().print(
            f"{figure}: {with_them:.2f} with metrics, {without:.2f} without, ratio {ratio:.3f} "
            f"(quartiles {low:.3f} to {high:.3f})",
            soft_wrap=True,
        )


def scrape(server: Server) -> None:
    """Print what a thousand scrapes a minute cost, and as many requests that do nothing."""
    shares = {
        path: [_share_of_a_core(server, path) for _ in range(NUM_SCRAPINGS)]
        for path in ("/metrics", "/live", None)
    }
    idle = statistics.median(shares[None])
    for path in ("/metrics", "/live"):
        more = statistics.median(shares[path]) - idle
        Console().print(f"1,000 times a minute GET {path}: {more:.2%} of a core, all processes")


def _share_of_a_core(server: Server, path: str | None) -> float:
    """Ask for a path at the rate of scrapes, or for none; return the CPU time per second."""
    connection = HTTPConnection("127.0.0.1", server.port)
    began_s, began_cpu_s, num = time.monotonic(), cpu_s(server.process), 0
    while (now_s := time.monotonic() - began_s) < SCRAPING_S:
        if path is None or num >= now_s * SCRAPES_PER_S:
            time.sleep(0.005)
            continue
        connection.request("GET", path)
        connection.getresponse().read()
        num += 1
    connection.close()
    return (cpu_s(server.process) - began_cpu_s) / SCRAPING_S


def main() -> None:
    """Measure, and print the figures and the goals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="of each order of starts")
    options = parser.parse_args()
    silent = ("--import-path", f"benchmarks.metrics:{build_silent.__name__}")
    kinds: dict[str, tuple[str, ...]] = {"with": (), "without": silent}
    pairs: Pairs = []
    orders: list[tuple[str, str]] = [("with", "without"), ("without", "with")]
    for names in orders:
        with ExitStack() as stack:
            model = Path(stack.enter_context(TemporaryDirectory())) / MODEL
            prompts = Prompts(save_three_million(model))
            started = {
                name: stack.enter_context(serving(name, ROOT, model, options.streams, *kinds[name]))
                for name in names
            }
            servers = started["with"], started["without"]
            pairs += compare(servers, prompts, options.streams, options.rounds)
            if names[0] == "without":
                scrape(servers[0])
    report(pairs)
    Console().print(f"goals: at most {GOAL:.0%} of a token's CPU time, {SCRAPE_GOAL:.0%} of a core")


if __name__ == "__main__":
    main()
