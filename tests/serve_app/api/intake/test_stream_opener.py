"""Schemas are compiled before anybody is admitted: what a flood of them may cost is bounded."""

import asyncio
import threading
from typing import Any

import httpx
import pytest

from deployments.engine.grammar_probe import MAX_NUM_PROBES
from serve_app.api import json_schema_grammar
from serve_app.api.json_schema_grammar import MAX_NUM_SCHEMAS
from tests.serve_app.fakes import FakeBackend

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
NUM_BEYOND = 10
DEADLINE_S = 60


class SlowProbe:
    """Holds every compilation until it is told to let them go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.most_at_once = 0
        self._num_running = 0
        self._lock = threading.Lock()

    def find_fault(self, grammar: str, max_seconds: int) -> None:
        with self._lock:
            self._num_running += 1
            self.most_at_once = max(self.most_at_once, self._num_running)
        assert self.let_go.wait(DEADLINE_S)
        with self._lock:
            self._num_running -= 1


async def test_a_flood_of_schemas_takes_two_compilers_and_nobody_s_place(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = SlowProbe()
    monkeypatch.setattr(json_schema_grammar, "find_fault", probe.find_fault)
    async with asyncio.timeout(DEADLINE_S):
        asked = {
            asyncio.create_task(client.post(CHAT, json={**ASK, "response_format": FORMAT}))
            for _ in range(MAX_NUM_SCHEMAS + NUM_BEYOND)
        }
        refused: set[asyncio.Task[httpx.Response]] = set()
        while len(refused) < NUM_BEYOND:
            done, _ = await asyncio.wait(asked - refused, return_when=asyncio.FIRST_COMPLETED)
            refused |= done
        for answer in (task.result() for task in refused):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "overloaded"
            assert "retry-after" in answer.headers
        assert backend.requests == [], "none has asked a replica"
        assert (await client.post(CHAT, json=ASK)).status_code == 200, "nobody else waits for them"
        probe.let_go.set()
        answers = await asyncio.gather(*(asked - refused))
    assert [answer.status_code for answer in answers] == [200] * MAX_NUM_SCHEMAS
    assert probe.most_at_once == MAX_NUM_PROBES
