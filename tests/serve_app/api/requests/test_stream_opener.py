"""Schemas are compiled before admission, so the cost of a flood of them is bounded here."""

import asyncio
import threading
from typing import Any

import pytest

from deployments.contract.grammar.probe import MAX_NUM_PROBES, Finding
from serve_app.api.structured import json_schema_grammar
from serve_app.api.structured.answer_grammar import MAX_NUM_SCHEMAS
from tests.offenders import for_each
from tests.serve_app.apps import Client, client_of, make_app
from tests.serve_app.fakes import FakeBackend

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
NUM_BEYOND = 10
DEADLINE_S = 60


class SlowProbe:
    """Holds every compilation until `let_go` is set."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.most_at_once = 0
        self._num_running = 0
        self._lock = threading.Lock()

    def examine(self, grammar: str, max_seconds: int) -> Finding:
        with self._lock:
            self._num_running += 1
            self.most_at_once = max(self.most_at_once, self._num_running)
        assert self.let_go.wait(DEADLINE_S)
        with self._lock:
            self._num_running -= 1
        return Finding(None)


async def test_a_flood_of_schemas_uses_two_compilers_and_delays_no_other_request(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = SlowProbe()
    monkeypatch.setattr(json_schema_grammar, "examine", probe.examine)
    async with asyncio.timeout(DEADLINE_S):
        asked = {
            asyncio.create_task(client.post(CHAT, json={**ASK, "response_format": FORMAT}))
            for _ in range(MAX_NUM_SCHEMAS + NUM_BEYOND)
        }
        refused: set[asyncio.Task[Any]] = set()
        while len(refused) < NUM_BEYOND:
            done, _ = await asyncio.wait(asked - refused, return_when=asyncio.FIRST_COMPLETED)
            refused |= done
        for answer in (task.result() for task in refused):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "overloaded"
            assert "retry-after" in answer.headers
        assert client.backend.requests == [], "no schema request has reached a replica"
        assert (await client.post(CHAT, json=ASK)).status_code == 200, "other requests don't wait"
        probe.let_go.set()
        answers = await asyncio.gather(*(asked - refused))
    assert [answer.status_code for answer in answers] == [200] * MAX_NUM_SCHEMAS
    assert probe.most_at_once == MAX_NUM_PROBES


LENGTHS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {**ASK, "max_tokens": 4096}, "max_tokens"),
    (CHAT, {**ASK, "max_completion_tokens": 4096}, "max_completion_tokens"),
    (CHAT, {**ASK, "max_tokens": 9, "max_completion_tokens": 9}, "max_completion_tokens"),
    ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 4096}, "max_tokens"),
    ("/text-generation", {"prompt": "hi", "max_tokens": 4096, "stream": False}, "max_tokens"),
]


@for_each(
    *(
        (path, fields, param, clamps)
        for path, fields, param in LENGTHS
        for clamps in (None, True, False)
    )
)
async def test_a_length_is_lowered_by_the_replica_unless_the_configuration_refuses_it(
    path: str, fields: dict[str, Any], param: str, clamps: bool | None
) -> None:
    backend = FakeBackend()
    limits = {} if clamps is None else {"clamp_max_tokens": clamps}
    async with client_of(make_app(backend, limits=limits)) as client:
        assert (await client.post(path, json=fields)).status_code == 200
    assert backend.requests[0].length_param == (param if clamps is False else None)
