"""Codex over the WebSocket of `/v1/responses`, with a model whose answers the test writes.

Minutes long the first time, since npm installs Codex.
"""

import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import uvicorn
from fastapi import FastAPI

from deployments.contract.messages import ChatMessage, TextPart
from tests.clients.real.environments import programs_of
from tests.clients.real.isolation import run_isolated
from tests.serve_app.apps import access_lines, make_app
from tests.serve_app.fakes import FakeBackend, text_of

pytestmark = pytest.mark.soak

SETTINGS = """\
model = "m"
model_provider = "raystream"

[model_providers.raystream]
name = "raystream"
base_url = "{url}/v1"
wire_api = "responses"
supports_websockets = true
request_max_retries = 0
stream_max_retries = 0
"""
ARGUMENTS = '{"cmd": "echo from-the-tool"}'
CALL = f'<tool_call>\n{{"name": "exec_command", "arguments": {ARGUMENTS}}}\n</tool_call>'


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listener])
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            server.should_exit = True


async def told_by_codex(app: FastAPI, folder: Path) -> list[dict[str, object]]:
    """Let Codex ask one question; return what it tells."""
    async with listening(app) as url:
        # `HOME` is another folder in each run, so the settings have one of their own.
        (folder / "config.toml").write_text(SETTINGS.format(url=url))
        (folder / "work").mkdir()
        options = ["--json", "--skip-git-repo-check", "--sandbox", "read-only"]
        command = ["env", f"CODEX_HOME={folder}", "codex", "exec", *options, "Ask the tool."]
        programs = programs_of("codex")
        done = await anyio.to_thread.run_sync(
            lambda: run_isolated(command, programs, folder / "work")
        )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


async def test_codex_runs_a_tool_loop_over_one_socket(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve.raystream.access")
    backend = FakeBackend(text_of("The tool has spoken."), tool_call_format="hermes")
    backend.scripts = [text_of(CALL)]
    events = await told_by_codex(make_app(backend), tmp_path)
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    told = json.dumps(items)
    assert '"exit_code": 0' in told
    assert "The tool has spoken." in told
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
    events = await told_by_codex(app, tmp_path)
    assert events[-1]["type"] == "turn.completed"
    lines = [(line["method"], line["status"]) for line in access_lines(caplog)]
    assert lines == [("GET", 426), ("POST", 200)]
