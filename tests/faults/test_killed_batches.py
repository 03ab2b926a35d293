"""Ingresses that run a batch are killed; each line has one result, as in a run without kills.

The ingresses are processes that share a folder, and their replica is a real one, in this process.
"""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.generator_replica import GeneratorReplica
from tests.faults import test_lost_at_each_token
from tests.faults.batch_client import BatchClient, jsonl
from tests.faults.ingress_process import Ingress, context, listening_replica
from tests.measured import Record
from tests.serve_app.local_replica import local_generator

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def generator() -> Iterator[GeneratorReplica]:
    with local_generator(
        test_lost_at_each_token.FOLDER, max_model_len=384, max_num_seqs=32
    ) as made:
        yield made


def lines(num_good: int, num_bad: int) -> str:
    """Return greedy lines, sampled ones with seeds, and bad ones among them."""
    bodies: list[dict[str, Any]] = [
        {
            "messages": [{"role": "user", "content": f"What does the function number {at} do?"}],
            "max_tokens": 24,
            "ignore_eos": True,
            **({"temperature": 0} if at % 2 else {"temperature": 1.2, "seed": at}),
        }
        for at in range(num_good)
    ]
    step = max(1, num_good // num_bad)
    for at in range(num_bad):
        bodies.insert(at * step, {"messages": "none"})
    return jsonl(
        {"custom_id": f"line {at}", "method": "POST", "url": CHAT, "body": body}
        for at, body in enumerate(bodies)
    )


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_good", "num_bad", "num_kills"),
    [(190, 10, 3), pytest.param(1980, 20, 20, marks=pytest.mark.soak)],
)
async def test_each_line_of_a_batch_has_one_result_whatever_dies(
    generator: GeneratorReplica,
    tmp_path: Path,
    record: Record,
    num_good: int,
    num_bad: int,
    num_kills: int,
) -> None:
    processes, description = context(), await generator.describe()
    text, total = lines(num_good, num_bad), num_good + num_bad
    flows = asyncio.Event()
    flows.set()
    async with (
        listening_replica(generator, flows) as port,
        httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_keepalive_connections=0)) as client,
    ):
        start = partial(Ingress, processes, description, port)
        ingresses = [start(str(tmp_path / "undisturbed"))]
        try:
            undisturbed = BatchClient(client, ingresses[0].url)
            batch = await undisturbed.until(await undisturbed.create(CHAT, text))
            expected = await undisturbed.results(batch)
            ingresses += [start(str(tmp_path / "killed")) for _ in range(2)]
            id_ = await BatchClient(client, ingresses[1].url).create(CHAT, text)
            num_lost = 0
            for at in range(num_kills):
                victim, other = (1, 2) if at % 2 == 0 else (2, 1)
                survivor = BatchClient(client, ingresses[other].url)
                seen = await survivor.until(id_, total * (at + 1) // 25)
                num_lost += seen["status"] == "in_progress"
                # The batch must not end before the next kill, however long a start takes.
                flows.clear()
                ingresses[victim].kill()
                ingresses[victim] = start(str(tmp_path / "killed"))
                await BatchClient(client, ingresses[victim].url).until(id_, 0)
                flows.set()
            last = BatchClient(client, ingresses[1].url)
            batch = await last.until(id_)
            found = await last.results(batch)
        finally:
            for ingress in ingresses:
                ingress.kill()
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": total, "completed": num_good, "failed": num_bad}
    assert found == expected
    assert len(found) == total
    assert {result.status for result in found.values()} == {200, 400}
    record("kills under a running batch", num_lost)
    assert num_lost == num_kills
