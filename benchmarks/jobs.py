"""How long a list and a look at a batch take with many of them in the store, and the memory.

python -m benchmarks.jobs [NUM_BATCHES]
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import psutil
from rich.console import Console

from serve_app.config import JobsConfig
from serve_app.jobs.jobs import Jobs
from serve_app.jobs.store import Page, Store

NUM_CALLS = 500


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


async def measure(num_batches: int) -> None:
    """Print a line for each kind of call."""
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(JobsConfig(max_num_files=10**6), Store(Path(folder) / "jobs"))
        ids = await fill(jobs, num_batches)
        random = Random(0)
        before = psutil.Process().memory_info().rss
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "list of 20 batches": lambda: jobs.batches.page("", Page(None, 20)),
            "list from the middle": lambda: jobs.batches.page("", Page(random.choice(ids), 20)),
            "a batch": lambda: jobs.batches.find("", random.choice(ids)),
            "list of 100 files": lambda: jobs.files.page("", Page(None, 100)),
            "room for a file": lambda: jobs.files.require_room(""),
            "claim of nothing": lambda: jobs.batches.claim("a"),
        }
        for name, call in calls.items():
            console.print(f"{name}: p95 {await p95_ms(call):.2f} ms")
        grown = psutil.Process().memory_info().rss - before
        console.print(f"memory grew by {grown / 2**20:.1f} MiB")
        await jobs.store.close()


if __name__ == "__main__":
    asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
