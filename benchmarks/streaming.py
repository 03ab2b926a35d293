"""Compares streams of this checkout with an older commit's: gaps, tokens a second, time to first.

Both serve a random model of 3 million parameters as `make serve` does, each with its own code and
its own Ray. The older code is taken from git into a temporary folder. A closed loop of 1 to 256
streams asks for answers of 64 tokens to prompts of about 64, no two of which begin alike. Rounds
alternate, and medians of the rounds are compared, since machines are noisy.
`benchmarks.serving.rounds` says what each figure is.

An older commit than `BASELINE` runs only in an environment that has what it imports.

Run: python -m benchmarks.streaming [--streams 64,256]
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from benchmarks.cpu_shapes import THREE_MILLION, save_shape
from benchmarks.serving.old_checkout import BASELINE, ROOT, old_checkout
from benchmarks.serving.processes import started
from benchmarks.serving.rounds import Prompts, Server, compare
from serve_app.commands.server_environment import HAPROXY_PORTS, free_ports

CODE = ("serve_app", "deployments", "benchmarks", "k8s", "serve_config.yaml", "serve.env")
MODEL = "three-million"
NUM_REQUESTS = {1: 32, 8: 128, 16: 192, 32: 256, 64: 384, 256: 768}
"""In one round, by the number of streams."""

GOALS_MS = {64: 20.0, 256: 60.0}
"""The largest median gap, by the number of streams."""


@contextmanager
def serving(name: str, checkout: Path, model: Path, max_num_seqs: int) -> Iterator[Server]:
    """Serve the model with a checkout's code until the block ends.

    Args:
        name: The server's name in tables and of its log.
        checkout: The folder with the code.
        model: The folder with the model.
        max_num_seqs: The most sequences that run at once.
    """
    port, *others = free_ports(1 + len(HAPROXY_PORTS))
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    environment |= dict(zip(HAPROXY_PORTS, map(str, others), strict=True))
    command = [sys.executable, "-m", "benchmarks.peers.serve_model", "--port", str(port)]
    command += ["--model", str(model), "--max-num-seqs", str(max_num_seqs)]
    command += ["--max-model-len", "1024"]
    log = model.with_name(f"{name}.log")
    url = f"http://127.0.0.1:{port}/ready"
    with started(command, url, log=log, cwd=checkout, environment=environment) as process:
        yield Server(name, port, process)


def main() -> None:
    """Compare, and print the figures and the goals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--baseline", default=BASELINE, help="the older commit")
    parser.add_argument("--streams", default="1,8,16,32,64,256")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    streams = [int(each) for each in options.streams.split(",")]
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        model = Path(folder) / MODEL
        prompts = Prompts(save_shape(THREE_MILLION, model), MODEL)
        old = stack.enter_context(old_checkout(options.baseline, *CODE))
        servers = (
            stack.enter_context(serving(options.baseline[:7], old, model, max(streams))),
            stack.enter_context(serving("now", ROOT, model, max(streams))),
        )
        num_requests = {each: NUM_REQUESTS.get(each, 4 * each) for each in streams}
        table = compare(servers, prompts, num_requests, options.rounds)
    Console().print(table)
    goals = ", ".join(f"{goal:.0f} ms at {count} streams" for count, goal in GOALS_MS.items())
    Console().print(f"goals: gap p50 at most {goals}; tokens/s no lower")


if __name__ == "__main__":
    main()
