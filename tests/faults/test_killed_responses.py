"""Ingresses that run responses in the background are killed; their events have no gap or repeat.

The ingresses are processes that share a folder, and their replica is a real one, in this process.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from deployments.engine.engine import Engine
from deployments.generator_replica import GeneratorReplica
from tests.faults import test_lost_at_each_token
from tests.faults.ingress_process import Ingress, context, listening_replica
from tests.measured import Record
from tests.serve_app.local_replica import local_generator

RESPONSES = "/v1/responses"
DEADLINE_S = 300
NUM_TOKENS = 96
NUM_FIRST_TOKENS = 5
"""Tokens that an answer may have before the kill: each answer has more."""


@pytest.fixture(scope="module")
def generator() -> Iterator[GeneratorReplica]:
    with local_generator(
        test_lost_at_each_token.FOLDER, max_model_len=384, max_num_seqs=16
    ) as made:
        yield made


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Return the event that the engine waits for before it goes on."""
    killed, step, num_tokens = Event(), Engine.step, Counter[str]()

    def waiting_step(self: Engine) -> Any:
        if max(num_tokens.values(), default=0) >= NUM_FIRST_TOKENS:
            assert killed.wait(DEADLINE_S)
        deltas = step(self)
        num_tokens.update(sequence_id for sequence_id, _ in deltas)
        return deltas

    monkeypatch.setattr(Engine, "step", waiting_step)
    yield killed
    killed.set()


async def create(client: httpx.AsyncClient, url: str, at: int) -> str:
    """Queue a response, greedy or sampled."""
    body = {
        "input": f"What does the function number {at} do?",
        "background": True,
        "max_output_tokens": NUM_TOKENS,
        "temperature": 0 if at % 2 else 1.2,
    }
    answer = await client.post(f"{url}{RESPONSES}", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def read(
    client: httpx.AsyncClient, url: str, id_: str, events: list[Any], most: int | None = None
) -> None:
    """Add the events behind those that are known, up to some number, the end or the kill."""
    query: dict[str, Any] = {"stream": "true"}
    if events:
        query["starting_after"] = events[-1]["sequence_number"]
    async with client.stream("GET", f"{url}{RESPONSES}/{id_}", params=query) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if most is not None and len(events) >= most:
                    return


async def until_killed(client: httpx.AsyncClient, url: str, id_: str, events: list[Any]) -> None:
    try:
        await read(client, url, id_, events)
    except httpx.TransportError:
        return


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("num_responses", [12, pytest.param(50, marks=pytest.mark.soak)])
async def test_the_events_of_a_killed_ingress_go_on_at_another(
    generator: GeneratorReplica,
    tmp_path: Path,
    record: Record,
    killed: Event,
    num_responses: int,
) -> None:
    processes, description = context(), await generator.describe()
    async with (
        asyncio.timeout(DEADLINE_S),
        listening_replica(generator) as port,
        httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_keepalive_connections=0)) as client,
    ):
        start = partial(Ingress, processes, description, port, str(tmp_path / "jobs"))
        victim = start()
        ingresses = [victim]
        try:
            ids = [await create(client, victim.url, at) for at in range(num_responses)]
            ingresses.append(start())  # after the first one has claimed them
            other = ingresses[1]
            seen: list[list[Any]] = [[] for _ in ids]
            readers = [
                asyncio.create_task(until_killed(client, victim.url, id_, events))
                for id_, events in zip(ids, seen, strict=True)
            ]
            probe: list[Any] = []
            await read(client, other.url, ids[0], probe, most=6)
            victim.kill()
            killed.set()
            await asyncio.gather(*readers)
            num_open = sum(not has_ended(events) for events in seen)
            await asyncio.gather(
                *(
                    read(client, other.url, id_, events)
                    for id_, events in zip(ids, seen, strict=True)
                    if not has_ended(events)
                )
            )
            for id_, events in zip(ids, seen, strict=True):
                again: list[Any] = []
                await read(client, other.url, id_, again)
                assert events == again
                assert [event["sequence_number"] for event in events] == list(range(len(events)))
                shown = (await client.get(f"{other.url}{RESPONSES}/{id_}")).json()
                assert events[-1]["response"] == shown
                assert shown["status"] in ("completed", "incomplete")
                deltas = [each["delta"] for each in events if each["type"].endswith("text.delta")]
                (message,) = shown["output"]
                assert "".join(deltas) == message["content"][0]["text"]
                assert shown["usage"]["output_tokens"] <= NUM_TOKENS
            assert seen[0][: len(probe)] == probe
            greedy = {
                "input": "What does the function number 1 do?",
                "max_output_tokens": NUM_TOKENS,
                "temperature": 0,
            }
            direct = (await client.post(f"{other.url}{RESPONSES}", json=greedy)).json()
            continued = seen[1][-1]["response"]
            assert texts(continued) == texts(direct)
            assert continued["usage"]["output_tokens"] == direct["usage"]["output_tokens"]
        finally:
            for ingress in ingresses:
                ingress.kill()
    record("responses that the kill has interrupted", num_open)
    assert num_open > 1


def has_ended(events: list[Any]) -> bool:
    return bool(events) and "response" in events[-1] and len(events) > 3


def texts(response: dict[str, Any]) -> list[str]:
    return [part["text"] for item in response["output"] for part in item["content"]]
