"""Codex over the WebSocket of `/v1/responses`, with a model whose answers the test writes.

Minutes long the first time, since npm installs Codex.
"""

import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvicorn
from fastapi import FastAPI

from deployments.contract.messages import ChatMessage, TextPart
from tests.clients.real.codex import TOOL, told_by_codex
from tests.scripted_model import call_of
from tests.serve_app.apps import access_lines, make_app
from tests.serve_app.fakes import FakeBackend, text_of

pytestmark = pytest.mark.soak

CALL = call_of(TOOL, '{"cmd": "echo from-the-tool"}')


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listener])
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            server.should_exit = True


async def told(app: FastAPI, folder: Path) -> list[dict[str, Any]]:
    """Let Codex ask one question; return what it tells."""
    async with listening(app) as url:
        return await anyio.to_thread.run_sync(told_by_codex, url, folder, "Ask the tool.")


async def test_codex_runs_a_tool_loop_over_one_socket(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve.raystream.access")
    backend = FakeBackend(text_of("The tool has spoken."), tool_call_format="hermes")
    backend.scripts = [text_of(CALL)]
    events = await told(make_app(backend), tmp_path)
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    completed = json.dumps(items)
    assert '"exit_code": 0' in completed
    assert "The tool has spoken." in completed
    assert events[-1]["type"] == "turn.completed"
    results = [
        part.text
        for message in backend.requests[-1].prompt
        if isinstance(message, ChatMessage) and message.role == "tool"
        for part in message.parts
        if isinstance(part, TextPart)
    ]
    assert len(results) == 1
    assert "from-the-tool" in results[0]
    lines = [(line["method"], line["status"]) for line in access_lines(caplog)]
    assert lines[0] == ("GET", 101)
    assert set(lines[1:]) == {("POST", 200)}
    assert len(backend.requests) == 2


async def test_codex_goes_on_by_http_where_no_socket_is_spoken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve.raystream.access")
    backend = FakeBackend(text_of("By request."), tool_call_format="hermes")
    app = make_app(backend, limits={"max_sockets": 0})
    events = await told(app, tmp_path)
    assert events[-1]["type"] == "turn.completed"
    lines = [(line["method"], line["status"]) for line in access_lines(caplog)]
    assert lines == [("GET", 426), ("POST", 200)]
