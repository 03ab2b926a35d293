"""Compares classification over HTTP with another server: requests a second, CPU, latency.

The other one is an older commit's, which runs as `make serve` does, with its own code and its own
Ray; or it is vLLM's own. Both serve a random model of RoBERTa's kind and stay up together. A
request is one text; a closed loop of users sends as many as are answered. CPU time is that of all
the server's processes, Ray's own included. Rounds alternate, and medians of the rounds are
compared, since machines are noisy. With the tiny shape nearly all of a request's time is its way;
the others show how much of that is left beside the model.

Run: python -m benchmarks.classification.beside --baseline COMMIT [--shape tiny,base]
     python -m benchmarks.classification.beside --baseline vllm [--shape base] [--dtype float32]
"""

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from benchmarks.classification.http_client import sender, session
from benchmarks.classification.load import Latencies, Send, closed_loop
from benchmarks.classification.shapes import (
    MAX_MODEL_LEN,
    ROBERTA_BASE,
    SMALL,
    TINY,
    Shape,
    build,
)
from benchmarks.classification.texts import MIXED, make_texts
from benchmarks.serving.old_checkout import BASELINE, ROOT, old_checkout
from benchmarks.serving.processes import started
from benchmarks.serving.rounds import Server, cpu_s
from serve_app.commands.server_environment import HAPROXY_PORTS, free_ports
from serve_app.vllm_environment import DEFAULT_FOLDER, python_of

VLLM = "vllm"
PATHS = {VLLM: "/classify"}
"""The path of a server's requests, where it is not ours."""

CODE = ("serve_app", "deployments", "benchmarks", "k8s", "serve_config.yaml", "serve.env")
SHAPES: Mapping[str, Shape] = {"tiny": TINY, "small": SMALL, "base": ROBERTA_BASE}
NUM_TEXTS = 512
WARM_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one round.

    Attributes:
        latencies: Of the requests of the window.
        cpu_ms: CPU time of a request.
    """

    latencies: Latencies
    cpu_ms: float


FIGURES: Mapping[str, Callable[[Round], float]] = {
    "requests/s": lambda each: each.latencies.rate,
    "CPU ms/request": lambda each: each.cpu_ms,
    "p50 ms": lambda each: each.latencies.percentile_ms(50),
    "p95 ms": lambda each: each.latencies.percentile_ms(95),
}


@contextmanager
def serving(
    name: str,
    checkout: Path,
    model: Path,
    dtype: str,
    *,
    task: str = "classify",
    traces: str | None = None,
) -> Iterator[Server]:
    """Serve a model with a checkout's code until the block ends.

    Args:
        name: The server's, and that of its log beside the model's folder.
        checkout: Where the code is.
        model: The model's folder.
        dtype: The type of its weights.
        task: classify or embed.
        traces: The collector that gets a trace of each request; None: none is made.
    """
    port, *others = free_ports(1 + len(HAPROXY_PORTS))
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    environment |= dict(zip(HAPROXY_PORTS, map(str, others), strict=True))
    command = [sys.executable, "-m", "benchmarks.peers.serve_model", "--task", task]
    command += ["--model", str(model), "--port", str(port), "--dtype", dtype]
    command += [] if traces is None else ["--otlp-endpoint", traces]
    log = model.with_name(f"{name}.log")
    url = f"http://127.0.0.1:{port}/ready"
    with started(command, url, log=log, cwd=checkout, environment=environment) as process:
        yield Server(name, port, process)


@contextmanager
def vllm_serving(engine_python: Path, model: Path, dtype: str) -> Iterator[Server]:
    """Serve a model with vLLM's own server until the block ends, on the cores of this process."""
    (port,) = free_ports(1)
    command = [str(python_of(engine_python)), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", model.name, "--runner", "pooling"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    command += ["--dtype", dtype, "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--gpu-memory-utilization", "0.2"]  # of the memory; it has no KV cache
    environment = {
        **os.environ,
        "PATH": f"{engine_python / 'bin'}:{os.environ['PATH']}",
        "LD_PRELOAD": str(engine_python / "lib" / "libiomp5.so"),  # as vLLM's documentation advises
        "KMP_BLOCKTIME": "1",  # its idle threads leave the cores to the other server
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    url = f"http://127.0.0.1:{port}/health"
    log = model.with_name("vllm.log")
    with started(command, url, log=log, cwd=model.parent, environment=environment) as process:
        yield Server(VLLM, port, process)


@asynccontextmanager
async def classifying(server: Server, model: str) -> AsyncIterator[Send]:
    """Yield what sends a server the text of a number, alone in a request."""
    texts = make_texts(MIXED, NUM_TEXTS)
    url = f"http://127.0.0.1:{server.port}{PATHS.get(server.name, '/v1/classify')}"
    async with session() as client:
        yield sender(client, url, lambda i: {"model": model, "input": texts[i % len(texts)]})


async def measure(server: Server, model: str, num_users: int, window_s: float) -> Round:
    """Load a server for a while and return the figures."""
    async with classifying(server, model) as send:
        await closed_loop(send, num_users, warm_up_s=0, window_s=WARM_UP_S)
        began_s = cpu_s(server.process)
        found = await closed_loop(send, num_users, warm_up_s=0, window_s=window_s)
        used_s = cpu_s(server.process) - began_s
    return Round(found, 1e3 * used_s / len(found.samples_s))


def compare(
    servers: tuple[Server, Server], model: str, users: list[int], num_rounds: int, window_s: float
) -> Table:
    """Measure by turns, and return a table of the medians and of the rounds' median ratios."""
    table = Table()
    for column in ("users", "figure", *(server.name for server in servers), "ratio"):
        table.add_column(column, justify="right")
    for num_users in users:
        pairs = []
        for turn in range(num_rounds):
            order = servers if turn % 2 else servers[::-1]
            rounds = {
                each: asyncio.run(measure(each, model, num_users, window_s)) for each in order
            }
            pairs.append([rounds[each] for each in servers])
        for figure, value in FIGURES.items():
            old, new = (statistics.median(value(pair[at]) for pair in pairs) for at in (0, 1))
            ratio = statistics.median(value(pair[1]) / value(pair[0]) for pair in pairs)
            cells = (f"{old:.2f}", f"{new:.2f}", f"{ratio:.2f}")
            table.add_row(str(num_users), figure, *cells, end_section=figure == [*FIGURES][-1])
    return table


def main() -> None:
    """Compare, and print the figures of each shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--baseline", default=BASELINE, help="an older commit, or vllm")
    parser.add_argument("--engine-python", type=Path, default=DEFAULT_FOLDER, help="vLLM's")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shape", default="tiny,base", help="of tiny, small and base")
    parser.add_argument("--users", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=float, default=5.0, help="seconds of one round")
    options = parser.parse_args()
    users = [int(each) for each in options.users.split(",")]
    for name in options.shape.split(","):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            model = build(SHAPES[name], folder)
            if options.baseline == VLLM:
                other = vllm_serving(options.engine_python.absolute(), model, options.dtype)
            else:
                old = stack.enter_context(old_checkout(options.baseline, *CODE))
                other = serving("before", old, model, options.dtype)
            servers = (
                stack.enter_context(other),
                stack.enter_context(serving("now", ROOT, model, options.dtype)),
            )
            table = compare(servers, model.name, users, options.rounds, options.window)
        table.title = f"{model.name}, {options.dtype}, texts of {MIXED} characters, one a request"
        Console().print(table)


if __name__ == "__main__":
    main()
