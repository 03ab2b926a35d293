"""Turns over the WebSocket of `/v1/responses` whose replicas are killed in their middle.

A WebSocket tells nothing of a move, so each turn is compared with an undisturbed one, event by
event.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest
from openai.resources.responses.responses import AsyncResponsesConnection

from tests.faults.served.kinds import MODEL, ROWS
from tests.faults.served.replicas import DEADLINE_S, Replicas, is_alive, kill
from tests.measured import Record
from tests.ray.serve_run import Server

LAST = ("response.completed", "response.incomplete", "response.failed", "error")
NAME = "socket"
NUM_DELTAS = 12
"""Of a turn, when its replica is killed."""

# The SDK's own use of websockets.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:connect\(\) must be used as a context manager:DeprecationWarning"
)


@pytest.fixture
async def connection(server: Server, replicas: Replicas) -> AsyncIterator[AsyncResponsesConnection]:
    """Connect once the file of these tests runs: an ingress that is replaced ends its sockets."""
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    async with client, client.responses.connect(max_retries=0) as connection:
        yield connection


class Turn:
    """The events of a turn, as they come."""

    def __init__(self, connection: AsyncResponsesConnection) -> None:
        self._connection = connection
        self.events: list[dict[str, Any]] = []

    async def ask(self, text: str, previous: str | None) -> None:
        """Ask for rows, greedily: their form says when they end."""
        rows = {"type": "json_schema", "name": "rows", "schema": ROWS}
        body = {
            "type": "response.create",
            "model": MODEL,
            "input": text,
            "temperature": 0,
            "max_output_tokens": 700,
            "text": {"format": rows},
            "previous_response_id": previous,
        }
        await self._connection.send_raw(json.dumps(body))

    async def read_deltas(self, num_deltas: int) -> None:
        """Read until so many pieces of text have come."""
        while sum("delta" in event for event in self.events) < num_deltas:
            await self._read_event()

    async def read_to_end(self) -> None:
        """Read what is left."""
        while not self.events or self.events[-1]["type"] not in LAST:
            await self._read_event()
        numbers = [event["sequence_number"] for event in self.events]
        assert numbers == list(range(len(numbers)))

    async def _read_event(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            event = (await self._connection.recv()).to_dict(mode="json")
        assert event["type"] != "error", event
        self.events.append(event)

    @property
    def id(self) -> str:
        """The response's id."""
        return str(self.events[0]["response"]["id"])

    def essence(self, previous: str | None) -> list[Any]:
        """Return all events, but for ids, times, what was cached, and where deltas are divided."""
        key = self.id.removeprefix("resp_")
        joined: list[Any] = []
        for event in self.events:
            told = {name: _kept(value, key) for name, value in event.items()}
            del told["sequence_number"]  # deltas count, too
            if "response" in told:
                assert told["response"].pop("previous_response_id") == previous
            if "delta" in told and joined and joined[-1]["type"] == told["type"]:
                joined[-1]["delta"] += told["delta"]
            else:
                joined.append(told)
        return joined


def _kept(value: Any, key: str) -> Any:
    """Return what does not differ between two equal turns; `key` is what their ids are made of."""
    if isinstance(value, str):
        return value.replace(key, "KEY")
    if isinstance(value, list):
        return [_kept(each, key) for each in value]
    if isinstance(value, dict):
        left_out = ("created_at", "cached_tokens")
        return {name: _kept(each, key) for name, each in value.items() if name not in left_out}
    return value


async def asked(
    connection: AsyncResponsesConnection, texts: Sequence[str]
) -> list[tuple[Turn, str | None]]:
    """Return the turns of a conversation, each with the id of the turn before."""
    turns: list[tuple[Turn, str | None]] = []
    for text in texts:
        turn, previous = Turn(connection), turns[-1][0].id if turns else None
        await turn.ask(text, previous)
        await turn.read_to_end()
        turns.append((turn, previous))
    return turns


async def test_turns_whose_replicas_are_killed_are_equal_event_by_event(
    connection: AsyncResponsesConnection, replicas: Replicas, record: Record
) -> None:
    texts = [f"held-{NAME}-{at} What does os.stat return?" for at in range(2)]
    replicas.release(NAME)
    expected = await asked(connection, texts)
    previous: str | None = None
    for text, (undisturbed, before) in zip(texts, expected, strict=True):
        replicas.hold(NAME)
        turn = Turn(connection)
        await turn.ask(text, previous)
        await turn.read_deltas(NUM_DELTAS)
        request_id = turn.id.removeprefix("resp_")
        (victim,) = replicas.runs_of(request_id)
        kill(victim)
        replicas.release(NAME)
        await turn.read_to_end()
        assert not is_alive(victim)
        assert replicas.runs_of(request_id)[-1] != victim
        assert turn.events[-1]["type"] == "response.completed"
        assert turn.essence(previous) == undisturbed.essence(before)
        record("events of a turn", len(turn.events))
        previous = turn.id
