"""Measures how soon refusals come when far more clients ask than the server admits.

The server runs the embedded chat model as `make serve` starts it, but 8 sequences run at once and
16 may wait; 200 clients ask at once for long answers. Each round counts admitted and refused
requests, and measures how long the refusals took from the common start, connecting included. The
first round is the first work of a fresh server. The clients run in this process, on the same cores,
so the figures include their own time.

Run: python -m benchmarks.admission
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from benchmarks.free_port import free_ports
from benchmarks.processes import started
from serve_app.commands.server_environment import HAPROXY_PORTS

ROOT = Path(__file__).resolve().parent.parent
MAX_NUM_SEQS, NUM_WAITING = 8, 16
NUM_TOKENS = 400
GOAL_MS = 500


@dataclass(frozen=True, slots=True)
class Answer:
    """One client's answer: its status, the seconds to its head, and whether it was complete."""

    status: int
    seconds: float
    is_complete: bool


async def ask(port: int, started_s: float) -> Answer:
    """Ask for a stream on a new connection, and read it to its end."""
    body = json.dumps(
        {"prompt": "os.path.join", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    ).encode()
    head = (
        "POST /text-generation HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    status = int((await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1])
    seconds = time.perf_counter() - started_s
    rest = await reader.read()
    writer.close()
    return Answer(status, seconds, b"data: [DONE]" in rest)


async def burst(port: int, num_clients: int) -> list[Answer]:
    """Let all clients ask at the same time."""
    started_s = time.perf_counter()
    return await asyncio.gather(*(ask(port, started_s) for _ in range(num_clients)))


def measure(num_ingresses: int, options: argparse.Namespace) -> Table:
    """Start a server with this many ingress replicas, send bursts, and return a row for each."""
    port, *others = free_ports(1 + len(HAPROXY_PORTS))
    os.environ |= dict(zip(HAPROXY_PORTS, map(str, others), strict=True))
    command = [sys.executable, "-m", "benchmarks.peers.serve_model", "--port", str(port)]
    command += ["--model", "models/pydoc-chat", "--max-model-len", "1024"]
    command += ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-queued-requests", str(NUM_WAITING)]
    command += ["--num-ingresses", str(num_ingresses), *(["--plain"] if options.plain else [])]
    mode = "plain" if options.plain else "HAProxy and gRPC"
    table = Table(title=f"{options.clients} clients at once, {num_ingresses} ingress, {mode}")
    for column in ("round", "admitted", "complete", "refused", "p50 ms", "p95 ms", "max ms"):
        table.add_column(column, justify="right")
    with TemporaryDirectory() as folder:
        log = Path(folder) / "serve_run.log"
        with started(command, f"http://127.0.0.1:{port}/ready", log=log, cwd=ROOT):
            for number in range(options.rounds + 1):
                answers = asyncio.run(burst(port, options.clients))
                add_row(table, "first" if number == 0 else str(number), answers)
    return table


def add_row(table: Table, name: str, answers: list[Answer]) -> None:
    """Add a round's figures."""
    refused = sorted(answer.seconds * 1000 for answer in answers if answer.status == 503)
    admitted = [answer for answer in answers if answer.status == 200]
    cuts = statistics.quantiles(refused, n=20) if len(refused) > 1 else [0.0] * 19
    table.add_row(
        name,
        str(len(admitted)),
        str(sum(answer.is_complete for answer in admitted)),
        str(len(refused)),
        f"{cuts[9]:.0f}",
        f"{cuts[18]:.0f}",
        f"{max(refused, default=0):.0f}",
    )


def main() -> None:
    """Measure behind one ingress replica and behind two, and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--ingresses", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="Serve's own proxy, without serve.env")
    options = parser.parse_args()
    for num_ingresses in options.ingresses:
        Console().print(measure(num_ingresses, options))
    Console().print(f"goal: p95 within {GOAL_MS} ms in each round")


if __name__ == "__main__":
    main()
