"""What the door costs: this checkout's ingress beside that of an older commit, on the same source.

Both run their own `build_app` on uvicorn, in processes of their own but in one Python environment,
in front of an instant source of tokens (`instant_server`), so that neither an engine nor Ray's
transport, which are the same to both doors, hides what the door itself takes. The older code is
taken from git into a temporary folder. Rounds alternate; medians are compared, since machines are
noisy. CPU time is the server process's own, and the steadier figure.

The baseline is the ingress before it had keys, limits and admission.

Run: python -m benchmarks.front_door
"""

import argparse
import asyncio
import io
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.instant_server import NUM_DELTAS, TOKENS_PER_DELTA

ROOT = Path(__file__).resolve().parent.parent
BASELINE = "febb12765bda9ee4d10a50bf14ef2e40a136b500"
SERVER = Path(__file__).with_name("instant_server.py")
TOKENS_PER_ANSWER = NUM_DELTAS * TOKENS_PER_DELTA
START_DEADLINE_S = 60
GOAL = 1.15
"""What a token may cost, beside the baseline."""


@dataclass(frozen=True, slots=True)
class Door:
    """A server under measurement."""

    name: str
    port: int
    process: psutil.Process


@dataclass(frozen=True, slots=True)
class Round:
    """What a round came to."""

    requests_per_s: float
    cpu_us_per_token: float


@contextmanager
def old_checkout(commit: str) -> Iterator[Path]:
    """Lay a commit's packages into a temporary folder."""
    archive = subprocess.run(
        ["git", "archive", commit, "serve_app", "deployments"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder)


@contextmanager
def started(name: str, checkout: Path) -> Iterator[Door]:
    """Run a checkout's ingress until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, SERVER, str(port)],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )
    try:
        _wait_until_open(port, process)
        yield Door(name, port, psutil.Process(process.pid))
    finally:
        process.kill()
        process.wait()


def _wait_until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"the server has ended with {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.05)
    sys.exit("the server did not start")


async def _client(port: int, request: bytes, num_requests: int) -> None:
    """Send one request after the other over one connection; read each answer to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    for _ in range(num_requests):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        length = re.search(rb"content-length: ([0-9]+)", head)
        # A stream has no length and ends with an empty chunk.
        body = await (
            reader.readexactly(int(length[1])) if length else reader.readuntil(b"\r\n0\r\n\r\n")
        )
        assert b'"stop"' in body, body
    writer.close()
    await writer.wait_closed()


def _request(*, stream: bool) -> bytes:
    body = json.dumps(
        {
            "model": "instant",
            "messages": [
                {"role": "system", "content": "Answer in one paragraph."},
                {"role": "user", "content": "What does os.path.join do?"},
            ],
            "temperature": 0.7,
            "max_tokens": 256,
            "stream": stream,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def measure(door: Door, *, stream: bool, num_clients: int, num_requests: int) -> Round:
    """Ask a server so many times over so many connections at once."""
    request = _request(stream=stream)

    async def all_clients() -> None:
        each = num_requests // num_clients
        await asyncio.gather(*(_client(door.port, request, each) for _ in range(num_clients)))

    cpu_before, before = _cpu_s(door.process), time.perf_counter()
    asyncio.run(all_clients())
    elapsed, cpu = time.perf_counter() - before, _cpu_s(door.process) - cpu_before
    num_answered = num_requests // num_clients * num_clients
    return Round(num_answered / elapsed, cpu * 1e6 / (num_answered * TOKENS_PER_ANSWER))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def compare(doors: tuple[Door, Door], rounds: int, num_requests: int) -> tuple[Table, float]:
    """Return a table of medians, and the worst ratio of CPU time."""
    table = Table(title=f"The door, answers of {TOKENS_PER_ANSWER} tokens")
    for column in ("answers", "clients", "figure", *(door.name for door in doors), "ratio"):
        table.add_column(column, justify="right")
    worst = 0.0
    for stream in (False, True):
        for num_clients in (1, 8):
            pairs = [
                [
                    measure(door, stream=stream, num_clients=num_clients, num_requests=num_requests)
                    for door in (doors if turn % 2 else reversed(doors))
                ][:: 1 if turn % 2 else -1]
                for turn in range(rounds + 1)
            ][1:]
            label = "streamed" if stream else "whole"
            _add(table, label, num_clients, "requests/s", pairs, lambda r: r.requests_per_s)
            ratio = _add(
                table, label, num_clients, "CPU us/token", pairs, lambda r: r.cpu_us_per_token
            )
            worst = max(worst, ratio)
    return table, worst


def _add(
    table: Table,
    label: str,
    num_clients: int,
    figure: str,
    pairs: list[list[Round]],
    value: Callable[[Round], float],
) -> float:
    old, new = (statistics.median(value(pair[at]) for pair in pairs) for at in (0, 1))
    ratio = statistics.median(value(pair[1]) / value(pair[0]) for pair in pairs)
    table.add_row(label, str(num_clients), figure, f"{old:.1f}", f"{new:.1f}", f"{ratio:.2f}")
    return ratio


def main() -> None:
    """Compare, print and tell whether the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--baseline", default=BASELINE, help="the older commit")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=1000, help="in one round of one server")
    options = parser.parse_args()
    with ExitStack() as stack:
        old = stack.enter_context(old_checkout(options.baseline))
        doors = (
            stack.enter_context(started(options.baseline[:7], old)),
            stack.enter_context(started("now", ROOT)),
        )
        table, worst = compare(doors, options.rounds, options.requests)
    Console().print(table)
    verdict = "within" if worst <= GOAL else "beyond"
    Console().print(f"CPU time at its worst: {worst:.2f} of the baseline, {verdict} {GOAL}")


if __name__ == "__main__":
    main()
