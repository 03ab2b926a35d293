"""Compares the cost of this checkout's ingress with an older commit's, on the same source.

Each runs its own `instant_server` on uvicorn, in separate processes but one Python environment: the
ingress's application in front of an instant source of tokens. So neither an engine nor Ray's
transport, which are the same for both, hides the cost of the ingress itself. The older code is
taken from git into a temporary folder. Rounds alternate, and medians are compared, since machines
are noisy. CPU time is measured for the server process, and is the steadier figure.

Streams are measured without and with an id for each event, as a client gets them that may resume.
An older commit may send none; then the ratio is what they cost.

With `--ray` each runs on its own Ray, in the mode of serve.env, with the source behind a handle
(`instant_ray_server`). CPU time is then given for the ingress replica and for all processes.

An older commit than `BASELINE` runs only in an environment that has what it imports.

Run: python -m benchmarks.front_door [--ray]
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.instant_server import NUM_DELTAS, TOKENS_PER_DELTA
from benchmarks.serving.old_checkout import BASELINE, ROOT, old_checkout
from serve_app.commands.server_environment import HAPROXY_PORTS, free_ports
from serve_app.shipped_files import parse_env

SERVER = "benchmarks.instant_server"
RAY_SERVER = "benchmarks.instant_ray_server"
CODE = ("serve_app", "deployments", "benchmarks", "k8s", "serve_config.yaml", "serve.env")
TOKENS_PER_ANSWER = NUM_DELTAS * TOKENS_PER_DELTA
START_DEADLINE_S = 120
INGRESS_TITLE = "door:Ingress"
"""Part of the title that Ray gives to the ingress replica's process."""
KINDS = (("unstreamed", False, False), ("streamed", True, False), ("with ids", True, True))
"""What is asked for: a name, whether it is a stream, and whether its events have ids."""

GOAL = 1.15
"""The most that a token may cost, as a multiple of the baseline."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server under measurement."""

    name: str
    port: int
    ingress: psutil.Process
    others: tuple[psutil.Process, ...] = ()


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one round."""

    requests_per_s: float
    cpu_us_per_token: float
    all_cpu_us_per_token: float


@contextmanager
def started(name: str, checkout: Path, *, on_ray: bool) -> Iterator[Server]:
    """Run a checkout's ingress until the block ends."""
    port, *other_ports = free_ports(1 + len(HAPROXY_PORTS))
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    if on_ray:
        environment |= parse_env((ROOT / "serve.env").read_text())
        environment |= dict(zip(HAPROXY_PORTS, map(str, other_ports), strict=True))
    process = subprocess.Popen(
        [sys.executable, "-m", RAY_SERVER if on_ray else SERVER, str(port)],
        cwd=checkout,
        env=environment,
    )
    root = psutil.Process(process.pid)
    try:
        _wait_until_ready(port, process)
        yield _server_of(name, port, root) if on_ray else Server(name, port, root)
    finally:
        for each in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def _server_of(name: str, port: int, root: psutil.Process) -> Server:
    everything = (root, *root.children(recursive=True))
    (ingress,) = (each for each in everything if INGRESS_TITLE in " ".join(each.cmdline()))
    return Server(name, port, ingress, tuple(each for each in everything if each != ingress))


def _wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"the server exited with {process.returncode}")
        # At first no process listens; then HAProxy does, but has no route yet.
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
            return
        time.sleep(0.05)
    sys.exit("the server did not start")


async def _client(port: int, request: bytes, num_requests: int) -> None:
    """Send requests one by one over one connection, reading each answer to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    for _ in range(num_requests):
        writer.write(request)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            # HAProxy closes idle connections when it gets a new configuration.
            if error.partial:
                raise
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
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


def _request(*, stream: bool, has_ids: bool) -> bytes:
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
        f"Accept: {'text/event-stream' if has_ids else '*/*'}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def measure(
    server: Server, *, stream: bool, has_ids: bool, num_clients: int, num_requests: int
) -> Round:
    """Send `num_requests` to a server over `num_clients` concurrent connections."""
    request = _request(stream=stream, has_ids=has_ids)

    async def all_clients() -> None:
        each = num_requests // num_clients
        await asyncio.gather(*(_client(server.port, request, each) for _ in range(num_clients)))

    cpu_before, all_before = _cpu_s(server.ingress), _cpu_s(server.ingress, *server.others)
    before = time.perf_counter()
    asyncio.run(all_clients())
    elapsed = time.perf_counter() - before
    cpu = _cpu_s(server.ingress) - cpu_before
    all_cpu = _cpu_s(server.ingress, *server.others) - all_before
    num_answered = num_requests // num_clients * num_clients
    num_tokens = num_answered * TOKENS_PER_ANSWER
    return Round(num_answered / elapsed, cpu * 1e6 / num_tokens, all_cpu * 1e6 / num_tokens)


def _cpu_s(*processes: psutil.Process) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # Ray stops surplus workers
            times = process.cpu_times()
            total += times.user + times.system
    return total


def compare(servers: tuple[Server, Server], rounds: int, num_requests: int) -> tuple[Table, float]:
    """Return a table of medians, and the worst ratio of CPU time."""
    table = Table(title=f"The ingress, answers of {TOKENS_PER_ANSWER} tokens")
    for column in ("answers", "clients", "figure", *(server.name for server in servers), "ratio"):
        table.add_column(column, justify="right")
    worst = 0.0
    for label, stream, has_ids in KINDS:
        for num_clients in (1, 8):
            pairs = [
                [
                    measure(
                        server,
                        stream=stream,
                        has_ids=has_ids,
                        num_clients=num_clients,
                        num_requests=num_requests,
                    )
                    for server in (servers if turn % 2 else reversed(servers))
                ][:: 1 if turn % 2 else -1]
                for turn in range(rounds + 1)
            ][1:]
            _add(table, label, num_clients, "requests/s", pairs, lambda r: r.requests_per_s)
            ratio = _add(
                table, label, num_clients, "CPU us/token", pairs, lambda r: r.cpu_us_per_token
            )
            worst = max(worst, ratio)
            if servers[0].others:
                _add(
                    table, label, num_clients, "all CPU us/token", pairs,
                    lambda r: r.all_cpu_us_per_token,
                )  # fmt: skip
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
    """Compare, and print the figures and whether the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--baseline", default=BASELINE, help="the older commit")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=1000, help="in one round of one server")
    parser.add_argument("--ray", action="store_true", help="through Ray Serve, not uvicorn")
    options = parser.parse_args()
    with ExitStack() as stack:
        old = stack.enter_context(old_checkout(options.baseline, *CODE))
        servers = (
            stack.enter_context(started(options.baseline[:7], old, on_ray=options.ray)),
            stack.enter_context(started("now", ROOT, on_ray=options.ray)),
        )
        table, worst = compare(servers, options.rounds, options.requests)
    Console().print(table)
    verdict = "within" if worst <= GOAL else "beyond"
    Console().print(f"CPU time at its worst: {worst:.2f} of the baseline, {verdict} {GOAL}")


if __name__ == "__main__":
    main()
