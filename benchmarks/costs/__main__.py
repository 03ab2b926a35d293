"""What a classified text costs beside the model's products: short requests over HTTP.

The first table divides the CPU time of all the server's processes, in ms a text, among the parts of
a text's way. Two windows follow each other: in one the kernel's counts are read, in the other
py-spy looks at the stacks, which takes a part of the cores. The second table divides the latency
with one user among the hops of a request, in ms. It is of a server that traces each request, which
costs some 0.5 ms; its title says what the latency is without traces.

On a busy machine the division among parts is wrong: a thread that waits for a core looks as if it
ran, most often where it has just woken another one.

Run: python -m benchmarks.costs [--shape tiny,base] [--users 1,32] [--window 10]
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.classification.beside import NUM_TEXTS, SHAPES, WARM_UP_S, classifying, serving
from benchmarks.classification.load import Latencies, closed_loop
from benchmarks.classification.shapes import build
from benchmarks.classification.texts import MIXED, make_texts
from benchmarks.costs.cpu_time import Part, divided, processes_of, sampled, thread_seconds
from benchmarks.costs.hops import HOPS, ask_one_by_one, collecting, medians_ms
from benchmarks.costs.parts import Role, parts_of
from benchmarks.serving.old_checkout import ROOT
from benchmarks.serving.rounds import Server

ROLES: Final[Sequence[Role]] = ("HAProxy", "ingress", "replica", "Ray")
LEAST_MS = 0.005
"""Parts that take less at any number of users are left out."""


async def load(server: Server, model: str, num_users: int, window_s: float) -> Latencies:
    """Let users classify texts at a server for a while."""
    async with classifying(server, model) as send:
        return await closed_loop(send, num_users, warm_up_s=0, window_s=window_s)


def cpu_ms(
    server: Server, model: str, num_users: int, window_s: float, folder: Path
) -> tuple[dict[Part, float], Latencies]:
    """Return the CPU time of each part, in ms a text, and the latencies without py-spy."""
    asyncio.run(load(server, model, num_users, WARM_UP_S))
    processes = processes_of(server.process, model)
    before = thread_seconds(processes)
    latencies = asyncio.run(load(server, model, num_users, window_s))
    after = thread_seconds(processes)
    with sampled(processes, folder) as samples:
        asyncio.run(load(server, model, num_users, window_s))
    used = {key: seconds - before.get(key, 0.0) for key, seconds in after.items()}
    num_texts = len(latencies.samples_s)
    parts = {part: 1e3 * seconds / num_texts for part, seconds in divided(used, samples).items()}
    return parts, latencies


def cpu_table(title: str, found: Mapping[int, Mapping[Part, float]]) -> Table:
    """Return the CPU time of each part by the number of users."""
    table = Table(title=title)
    for column in ("process", "part"):
        table.add_column(column, no_wrap=True)
    for num_users in found:
        table.add_column(f"{num_users} user{'s' * (num_users > 1)}", justify="right")
    for role in ROLES:
        known = {part for of_users in found.values() for at, part in of_users if at == role}
        order = [part for part in parts_of(role) if part in known]
        for part in [*order, *sorted(known - {*order})]:
            row = [of_users.get((role, part), 0.0) for of_users in found.values()]
            if max(row) >= LEAST_MS:
                table.add_row(role, part, *(f"{each:.3f}" for each in row))
        table.add_section()
    sums = [sum(of_users.values()) for of_users in found.values()]
    table.add_row("all", "", *(f"{each:.3f}" for each in sums))
    return table


def hops_ms(model: Path, dtype: str, window_s: float) -> dict[str, float]:
    """Return the median latency of each hop with one user, in ms."""
    texts = make_texts(MIXED, NUM_TEXTS)
    with (
        collecting() as collector,
        serving("traced", ROOT, model, dtype, traces=collector.url) as server,
    ):
        url = f"http://127.0.0.1:{server.port}/v1/classify"
        asyncio.run(ask_one_by_one(url, model.name, texts, WARM_UP_S))
        times = asyncio.run(ask_one_by_one(url, model.name, texts, window_s))
        collector.wait_for(times)
        return medians_ms(times, collector.by_trace)


def hop_table(title: str, hops: Mapping[str, float]) -> Table:
    """Return the latency of each hop."""
    table = Table(title=title)
    table.add_column("hop", no_wrap=True)
    table.add_column("ms", justify="right")
    for hop in HOPS:
        table.add_row(hop, f"{hops[hop]:.2f}")
    table.add_section()
    table.add_row("sum of the medians", f"{sum(hops.values()):.2f}")
    return table


def measure(shape: str, dtype: str, users: Sequence[int], window_s: float) -> list[Table]:
    """Return both tables of a shape."""
    found: dict[int, dict[Part, float]] = {}
    rates: list[str] = []
    alone_ms = float("nan")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = build(SHAPES[shape], folder)
        with serving("now", ROOT, model, dtype) as server:
            for num_users in users:
                parts, latencies = cpu_ms(server, model.name, num_users, window_s, folder)
                found[num_users] = parts
                rates.append(f"{latencies.rate:.1f}")
                if num_users == 1:
                    alone_ms = latencies.percentile_ms(50)
        of = f"{model.name}, {dtype}, texts of {MIXED} characters, one a request"
        tables = [cpu_table(f"CPU ms a text: {of}; {', '.join(rates)} texts/s", found)]
        if 1 in users:
            hops = hops_ms(model, dtype, window_s)
            without = f"{alone_ms:.2f} ms without traces"
            tables.append(hop_table(f"Latency with one user: {of}; median {without}", hops))
    return tables


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="tiny,base", help="of tiny, small and base")
    parser.add_argument("--users", default="1,32")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of one measurement")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    users = [int(each) for each in options.users.split(",")]
    for shape in options.shape.split(","):
        for table in measure(shape, options.dtype, users, options.window):
            Console().print(table)


if __name__ == "__main__":
    main()
