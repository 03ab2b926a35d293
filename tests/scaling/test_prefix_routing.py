"""Conversations stay at the replica that has their earlier turns in memory."""

import asyncio
from itertools import pairwise
from typing import Any

import httpx

from tests.faults.served.answer import read
from tests.faults.served.conftest import MODEL_SECTION
from tests.faults.served.kinds import about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import Replicas
from tests.measured import Record
from tests.scaling.conftest import MAX_NUM_REPLICAS

NUM_CONVERSATIONS = 8
NUM_TURNS = 4
LEAST_PART = 0.9


async def test_the_next_turn_goes_where_the_last_one_ran(
    client: httpx.AsyncClient, deployed: Deployed, replicas: Replicas, record: Record
) -> None:
    scaling = deployed.section(MODEL_SECTION)["autoscaling_config"]
    scaling |= {"min_replicas": MAX_NUM_REPLICAS, "initial_replicas": MAX_NUM_REPLICAS}
    await deployed.apply()
    await deployed.settled()
    await replicas.complete(MAX_NUM_REPLICAS)
    talks = await asyncio.gather(*(talk(client, i) for i in range(NUM_CONVERSATIONS)))
    moves = [pair for ids in talks for pair in pairwise([replicas.runs_of(id_)[0] for id_ in ids])]
    kept = sum(before == now for before, now in moves)
    assert kept >= LEAST_PART * len(moves)
    used = {replicas.runs_of(ids[0])[0] for ids in talks}
    assert used == set(replicas.alive), "the conversations are spread"
    record("turns at the replica of the turn before", f"{kept} of {len(moves)}")


async def talk(client: httpx.AsyncClient, number: int) -> list[str]:
    """Hold a conversation; return the ids of its requests."""
    system = {"role": "user", "content": "Answer briefly."}
    messages: list[dict[str, Any]] = [system, {"role": "assistant", "content": "Yes."}]
    ids = []
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"Conversation {number}, question {turn}?"})
        ids.append(f"slow-talk-{number}-{turn}")
        answer = await read(client, about("", messages=messages, max_tokens=20), request_id=ids[-1])
        assert answer.is_whole, answer.body
        messages.append({"role": "assistant", "content": answer.choices[0].text})
    return ids
