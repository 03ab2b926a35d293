"""Codex at the server that users start: a loop of tools over the WebSocket, and a death in it.

The model calls Codex's tool of its own accord. Minutes long the first time, since npm installs
Codex.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.clients.real.codex import TOOL, told_by_codex
from tests.faults.served.redeploy import Deployed
from tests.faults.served.relay import relaying
from tests.faults.served.replicas import Replicas, kill, reached
from tests.measured import Record
from tests.ray.serve_run import Server
from tests.scripted_model import call_of, save_scripted_model

pytestmark = pytest.mark.soak

MODEL = "scripted"
HELD = "codex"
QUESTION = f"held-{HELD}- Ask the tools."
DELTA = b'"response.output_text.delta"'
NUM_DELTAS = 12
"""Of the first turn, when its replica is killed."""

TURNS = (
    (
        *(f"thought {at:04d}. " for at in range(1500)),
        call_of(TOOL, '{"cmd": "echo the first"}'),
    ),
    ("Once more. ", call_of(TOOL, '{"cmd": "echo the second"}')),
    ("Both have ", "spoken."),
)


@pytest.fixture
async def scripted(deployed: Deployed, replicas: Replicas, tmp_path: Path) -> None:
    """Add two replicas of a model that calls Codex's tool twice."""
    source = save_scripted_model(tmp_path / MODEL, TURNS)
    deployed.models.append({"id": MODEL, "source": str(source), "num_cpus": 0.2, "max_num_seqs": 2})
    deployed.application["deployments"].append({"name": MODEL, "num_replicas": 2})
    await deployed.apply()
    await deployed.settled()


def essence(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return what Codex tells of its turn: what was said, what was run, and how it ended."""
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    told = [
        (item["type"], item["text"])
        if item["type"] == "agent_message"
        else (item["type"], item["aggregated_output"], item["exit_code"])
        for item in items
        if item["type"] in ("agent_message", "command_execution")
    ]
    return [*told, (events[-1]["type"],)]


async def told(url: str, folder: Path) -> list[tuple[Any, ...]]:
    return essence(await asyncio.to_thread(told_by_codex, url, folder, QUESTION, MODEL))


@pytest.mark.usefixtures("scripted")
async def test_a_loop_of_tools_outlasts_the_death_of_its_replica(
    server: Server, replicas: Replicas, tmp_path: Path, record: Record
) -> None:
    replicas.release(HELD)
    expected = [
        ("agent_message", "".join(TURNS[0][:-1]).strip()),
        ("command_execution", "the first\n", 0),
        ("agent_message", "Once more."),
        ("command_execution", "the second\n", 0),
        ("agent_message", "Both have spoken."),
        ("turn.completed",),
    ]
    async with relaying(server.url) as relay:
        assert await told(relay.url, tmp_path / "undisturbed") == expected
        assert relay.asked == ["GET /v1/responses HTTP/1.1"]
        replicas.hold(HELD)
        relay.sent.clear()
        codex = asyncio.create_task(told(relay.url, tmp_path / "killed"))
        await reached(lambda: relay.sent.count(DELTA) >= NUM_DELTAS or codex.done())
        assert not codex.done()
        (victim,) = (each for each in replicas.alive if replicas.counts_of(each)["num_sequences"])
        kill(victim)
        record("deltas before the death", relay.sent.count(DELTA))
        replicas.release(HELD)
        assert await codex == expected
        assert relay.asked == ["GET /v1/responses HTTP/1.1"] * 2
