"""Compares the shipped autoscaling policy with Ray Serve's own, on the same requests.

Both scale one chat model from one replica to three. Serve's own policy has
`target_ongoing_requests` at `max_num_seqs`, and otherwise Serve's defaults, as an operator gets it
who sets nothing else; with `--same-delays` it has our delays and intervals, so that only the
policies differ. Requests arrive at given times, whatever the server does: a quiet start, 40 s of
twice what one replica carries, quiet again, and three bursts of 40; then silence until one replica
is left. The steps of the replicas are slowed down as in the tests, so that three of them fit on two
cores. A round starts a server for each policy; the order alternates, and medians are compared.

`--plot FILE` draws the last round.

Run: python -m benchmarks.autoscaling
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks.pairs import compared
from tests.faults.served.answer import opened
from tests.faults.served.fragile_server import client_of, fragile_server
from tests.faults.served.kinds import about
from tests.faults.served.replicas import Replicas
from tests.faults.served.sizes import MAX_NUM_SEQS
from tests.ray.serve_run import Server
from tests.scaling.conftest import MAX_NUM_REPLICAS, scaled_config, shipped_scaling

QUESTION = about("os.path.join", max_tokens=60)
"""One and a half seconds of slow steps, so a replica carries about ten requests a second."""

PHASES = ((1.0, 10.0), (20.0, 40.0), (1.0, 40.0))
"""Requests a second, and for how many seconds."""

BURST_SIZE = 40
BURST_INTERVAL_S = 20.0
NUM_BURSTS = 3
SILENCE_S = 45.0
NUM_QUEUED = 24
SAMPLE_S = 0.1

SERVES: Final = "Serve's"
OURS: Final = "LoadPolicy"


def arrivals(seed: int) -> list[float]:
    """Return the seconds at which requests arrive."""
    random, start_s = Random(seed), 0.0
    times = []
    for rate, seconds in PHASES:
        times += [start_s + random.uniform(0, seconds) for _ in range(round(rate * seconds))]
        start_s += seconds
    for _ in range(NUM_BURSTS):
        times += [start_s] * BURST_SIZE
        start_s += BURST_INTERVAL_S
    return sorted(times)


@dataclass
class Run:
    """What a policy has made of a load.

    Attributes:
        began: When each admitted request arrived, and after which time its first token came, in s.
        refused: When each refused request arrived.
        replicas: Numbers of replicas that served, each with the time at which it was seen.
        num_failed: Requests with neither an answer nor a refusal.
    """

    began: list[tuple[float, float]] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    replicas: list[tuple[float, int]] = field(default_factory=list)
    num_failed: int = 0

    @property
    def p99_ttft_s(self) -> float:
        """The 99th percentile of the time to a first token."""
        return statistics.quantiles((ttft for _, ttft in self.began), n=100)[98]

    @property
    def replica_seconds(self) -> float:
        """Seconds of all replicas."""
        return SAMPLE_S * sum(number for _, number in self.replicas)


def run(scaling: Mapping[str, Any], times: Sequence[float]) -> Run:
    """Start a server with an `autoscaling_config`, and send the requests."""
    document = scaled_config()
    application = document["applications"][0]
    application["args"]["models"][0]["max_queued_requests"] = NUM_QUEUED
    application["deployments"][1]["autoscaling_config"] = dict(scaling)
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        folder = Path(name)
        with fragile_server(folder, document) as server:
            return asyncio.run(_send(server, times, Replicas(folder)))


def policies(*, has_same_delays: bool) -> dict[str, dict[str, Any]]:
    """Return the `autoscaling_config` of both.

    Args:
        has_same_delays: Whether Serve's policy gets our delays and intervals.
    """
    ours = shipped_scaling() | {"max_replicas": MAX_NUM_REPLICAS}
    kept = ours.keys() - {"policy"} if has_same_delays else {"min_replicas", "max_replicas"}
    target = {"target_ongoing_requests": MAX_NUM_SEQS}
    return {SERVES: {name: ours[name] for name in kept} | target, OURS: ours}


async def _send(server: Server, times: Sequence[float], replicas: Replicas) -> Run:
    found, loop, ids = Run(), asyncio.get_running_loop(), count()
    async with client_of(server) as client:
        start_s = loop.time()

        async def ask(at_s: float) -> None:
            await asyncio.sleep(start_s + at_s - loop.time())
            try:
                name = f"slow-scaling-{next(ids)}"
                async with opened(client, QUESTION, request_id=name) as stream:
                    if stream.answer.status == 503:
                        found.refused.append(at_s)
                        return
                    await stream.read_tokens(1)
                    found.began.append((at_s, loop.time() - start_s - at_s))
                    await stream.read_to_end()
            except (AssertionError, httpx.TransportError):
                found.num_failed += 1

        async def watch() -> None:
            while True:
                found.replicas.append((loop.time() - start_s, len(replicas.alive)))
                await asyncio.sleep(SAMPLE_S)

        watching = asyncio.create_task(watch())
        async with asyncio.TaskGroup() as group:
            for at_s in times:
                group.create_task(ask(at_s))
            group.create_task(asyncio.sleep(times[-1] + SILENCE_S))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return found


def plot(runs: Mapping[str, Run], times: Sequence[float], path: Path) -> None:
    """Draw requests, replicas, waiting requests, times to a first token and refusals."""
    figure, (load, replicas, waiting, ttft) = plt.subplots(
        4, figsize=(10, 9), sharex=True, layout="constrained"
    )
    seconds = range(int(times[-1] + SILENCE_S))
    load.hist(times, bins=list(seconds), color="0.6")
    load.set_ylabel("requests/s")
    for name, found in runs.items():
        (line,) = replicas.step(*zip(*found.replicas, strict=True), where="post", label=name)
        ended = [at_s + ttft_s for at_s, ttft_s in found.began]
        waiting.plot(
            seconds,
            [
                sum(at_s <= s for at_s, _ in found.began) - sum(at_s <= s for at_s in ended)
                for s in seconds
            ],
            color=line.get_color(),
        )
        ttft.scatter(*zip(*found.began, strict=True), s=4, color=line.get_color())
        ttft.scatter(found.refused, [-0.3] * len(found.refused), marker="x", color=line.get_color())
    replicas.set_ylabel("replicas")
    replicas.legend()
    waiting.set_ylabel("requests that wait")
    ttft.set_ylabel("time to first token, s; x: refused")
    ttft.set_xlabel("s")
    figure.savefig(path, dpi=100)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of both")
    parser.add_argument(
        "--same-delays", action="store_true", help="give Serve's policy our delays and intervals"
    )
    parser.add_argument("--plot", type=Path, help="a PNG file for the last round")
    args = parser.parse_args()
    scalings = policies(has_same_delays=args.same_delays)
    rounds: list[dict[str, Run]] = []
    for number in range(args.rounds):
        times = arrivals(number)
        names = (SERVES, OURS) if number % 2 == 0 else (OURS, SERVES)
        rounds.append({name: run(scalings[name], times) for name in names})
    table = Table(title=f"{len(times)} requests, {args.rounds} round(s)")
    for column in ("", SERVES, OURS, "ratio"):
        table.add_column(column, justify="right")
    figures: dict[str, Callable[[Run], float]] = {
        "refused": lambda r: len(r.refused),
        "failed": lambda r: r.num_failed,
        "time to first token, p99, s": lambda r: r.p99_ttft_s,
        "replica-seconds": lambda r: r.replica_seconds,
    }
    for name, value in figures.items():
        pairs = [(float(value(each[SERVES])), float(value(each[OURS]))) for each in rounds]
        served, ours, ratio = compared((a, b or 1e-9) for a, b in pairs)
        table.add_row(name, f"{served:.1f}", f"{ours:.1f}", f"{ratio:.2f}" if ours > 1e-6 else "-")
    Console().print(table)
    if args.plot is not None:
        plot(rounds[-1], times, args.plot)


if __name__ == "__main__":
    main()
