"""How long lists and looks take with many batches in the store, over HTTP too, and the memory.

Over HTTP a line says how its 95th percentile relates to `/health`'s, which reads no store, and how
the memory of the server's process relates to that of one with few batches after the same requests.

python -m benchmarks.jobs [NUM_BATCHES]
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import httpx
import psutil
from rich.console import Console

from benchmarks.free_port import free_port
from serve_app.config import JobsConfig
from serve_app.jobs.jobs import Jobs
from serve_app.jobs.store import Page, Store

NUM_CALLS = 500
GOAL_MS = 20.0
HEALTH = "/health"
START_S = 120
NUM_FEW = 100
"""Batches in the store that the memory is compared with."""


async def fill(jobs: Jobs, num_batches: int) -> list[str]:
    """Put files and ended batches into the store; return the ids of the batches."""
    await jobs.files.require_room("")
    ids = [f"batch_{at:032x}" for at in range(num_batches)]
    await jobs.store.write(
        lambda connection: connection.executemany(
            "INSERT INTO files (id, owner, filename, purpose, num_bytes, created_s, expires_s) "
            "VALUES (?, '', 'a.jsonl', 'batch', 1000, 0, 1e12)",
            [(f"file-{at:032x}",) for at in range(num_batches)],
        )
    )
    await jobs.store.write(
        lambda connection: connection.executemany(
            "INSERT INTO batches (id, owner, tenant, endpoint, input_file_id, completion_window, "
            "status, moments, created_s, due_s, expires_s, num_lines, num_completed) "
            "VALUES (?, '', '', '/v1/completions', ?, '24h', 'completed', '{}', 0, 1, 1e12, 9, 9)",
            [(id_, f"file-{at:032x}") for at, id_ in enumerate(ids)],
        )
    )
    return ids


async def p95_ms(call: Callable[[], Awaitable[object]]) -> float:
    """Return the 95th percentile of how long a call takes, in milliseconds."""
    taken: list[float] = []
    for _ in range(NUM_CALLS):
        began = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[NUM_CALLS * 95 // 100] * 1000


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, psutil.Process]]:
    """Serve the jobs of a folder by the application in another process; yield it and a client."""
    port = free_port()
    command = (sys.executable, "-m", "benchmarks.instant_server", str(port), str(folder))
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            async with asyncio.timeout(START_S):
                while not await is_up(client):  # noqa: ASYNC110 - another process starts
                    await asyncio.sleep(0.1)
            yield client, psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


async def is_up(client: httpx.AsyncClient) -> bool:
    """Whether the server answers."""
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


@dataclass(frozen=True)
class Served:
    """What a server took to answer.

    Attributes:
        p95_ms: The 95th percentile of each kind of request, in milliseconds.
        rss_bytes: The resident memory of its process after all of them.
    """

    p95_ms: Mapping[str, float]
    rss_bytes: int


async def measure_http(folder: Path, ids: list[str]) -> Served:
    """Ask for lists and batches over HTTP, and for `/health`, which reads no store."""
    random = Random(0)
    paths: dict[str, Callable[[], str]] = {
        HEALTH: lambda: HEALTH,
        "a list of 20 batches": lambda: "/v1/batches",
        "a list from the middle": lambda: f"/v1/batches?after={random.choice(ids)}",
        "a batch": lambda: f"/v1/batches/{random.choice(ids)}",
        "a list of 100 files": lambda: "/v1/files?limit=100",
    }
    async with served(folder) as (client, process):

        async def get(path: Callable[[], str]) -> None:
            (await client.get(path())).raise_for_status()

        taken_ms = {name: await p95_ms(partial(get, path)) for name, path in paths.items()}
        return Served(taken_ms, process.memory_info().rss)


def show(found: Served, few: Served, console: Console) -> None:
    """Print a line for each kind of request, and one for the memory."""
    idle_ms = found.p95_ms[HEALTH]
    for name, taken_ms in found.p95_ms.items():
        console.print(
            f"over HTTP, {name}: p95 {taken_ms:.2f} ms (goal {GOAL_MS:g}), "
            f"{taken_ms / idle_ms:.1f} times /health"
        )
    console.print(
        f"the server's memory: {found.rss_bytes / 2**20:.1f} MiB, "
        f"{found.rss_bytes / few.rss_bytes:.3f} times that with {NUM_FEW} batches"
    )


async def filled(folder: Path, num_batches: int) -> tuple[Jobs, list[str]]:
    """Return a new store with batches, and their ids."""
    jobs = Jobs(JobsConfig(max_num_files=10**6), Store(folder))
    return jobs, await fill(jobs, num_batches)


async def measure(num_batches: int) -> None:
    """Print a line for each kind of call."""
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few, few_ids = await filled(folder / "few", NUM_FEW)
        with_few = await measure_http(folder / "few", few_ids)
        await few.store.close()
        jobs, ids = await filled(folder / "jobs", num_batches)
        random = Random(0)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "list of 20 batches": lambda: jobs.batches.page("", Page(None, 20)),
            "list from the middle": lambda: jobs.batches.page("", Page(random.choice(ids), 20)),
            "a batch": lambda: jobs.batches.find("", random.choice(ids)),
            "list of 100 files": lambda: jobs.files.page("", Page(None, 100)),
            "room for a file": lambda: jobs.files.require_room(""),
            "claim of nothing": lambda: jobs.batches.claim("a"),
        }
        for each, call in calls.items():
            console.print(f"{each}: p95 {await p95_ms(call):.2f} ms")
        show(await measure_http(folder / "jobs", ids), with_few, console)
        await jobs.store.close()


if __name__ == "__main__":
    asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
