"""How soon a refusal comes when many more ask than are admitted.

The embedded chat model behind real HTTP, with 8 slots and 16 places behind them; 200 clients ask at
once for long answers. Each round counts who was admitted, who was refused and how long the refusals
took, from the moment when all began, connecting included. The clients are this process, on the same
cores, so what they take themselves is in the figures.

Run: python -m benchmarks.admission
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.free_port import free_port
from k8s.make_base import parse_env

if TYPE_CHECKING:
    from serve_app.config import ModelConfig

ROOT = Path(__file__).resolve().parent.parent
NUM_SLOTS, NUM_WAITING = 8, 16
NUM_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Answer:
    """What one client got: its status, seconds to the head of it, and how the body ended."""

    status: int
    seconds: float
    is_whole: bool


async def ask(port: int, started_s: float) -> Answer:
    """Ask for a stream on a connection of its own, and read it to its end."""
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
    """Let all clients ask at once."""
    started_s = time.perf_counter()
    return await asyncio.gather(*(ask(port, started_s) for _ in range(num_clients)))


def serve_model(num_ingresses: int, port: int) -> None:
    """Start Ray as `make serve` does, with so many ingress replicas."""
    # Ray reads serve.env's switches when it is imported.
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    from deployments.text_generator import TextGenerator
    from serve_app.app import resolve
    from serve_app.config import AppConfig
    from serve_app.ingress import Ingress

    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
    model = model_config()
    generator = serve.deployment(
        name=model.deployment_name, max_ongoing_requests=512, ray_actor_options={"num_cpus": 0.5}
    )(TextGenerator).bind(resolve(model, num_cluster_gpus=0))
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=num_ingresses,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0.2},
    )(Ingress)
    config = AppConfig(models=(model,))
    serve.run(ingress.bind(config, {model.id: generator}), name="admission")


def model_config() -> "ModelConfig":
    """Return the embedded model with the limits that are measured."""
    from serve_app.config import ModelConfig

    return ModelConfig(
        id="pydoc-chat",
        source="models/pydoc-chat",
        max_model_len=1024,
        max_num_seqs=NUM_SLOTS,
        max_queued_requests=NUM_WAITING,
    )


def main() -> None:
    """Measure, and print a line for each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--ingresses", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="Serve's own proxy, no serve.env")
    options = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if not options.plain:
        os.environ.update(parse_env((ROOT / "serve.env").read_text()))
    port = free_port()
    serve_model(options.ingresses, port)
    mode = "plain" if options.plain else "HAProxy and gRPC"
    table = Table(title=f"{options.clients} clients at once, {options.ingresses} ingress, {mode}")
    for column in ("round", "admitted", "whole", "refused", "p50 ms", "p95 ms", "max ms"):
        table.add_column(column, justify="right")
    for number in range(options.rounds + 1):
        answers = asyncio.run(burst(port, options.clients))
        add_row(table, "first" if number == 0 else str(number), answers)
    Console().print(table)


def add_row(table: Table, name: str, answers: list[Answer]) -> None:
    """Add what a round gave."""
    refused = sorted(answer.seconds * 1000 for answer in answers if answer.status == 503)
    admitted = [answer for answer in answers if answer.status == 200]
    cuts = statistics.quantiles(refused, n=20) if len(refused) > 1 else [0.0] * 19
    table.add_row(
        name,
        str(len(admitted)),
        str(sum(answer.is_whole for answer in admitted)),
        str(len(refused)),
        f"{cuts[9]:.0f}",
        f"{cuts[18]:.0f}",
        f"{max(refused, default=0):.0f}",
    )


if __name__ == "__main__":
    main()
