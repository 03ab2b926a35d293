"""`raystream batch` beside a server that is deployed anew meanwhile."""

import io
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from serve_app.client.batch_client import BatchClient
from serve_app.client.chat_client import ChatClient, ChatError, UnavailableError
from serve_app.commands.user import batch

ID = "batch_1"
WHOLE = b'{"custom_id": "a"}\n{"custom_id": "b"}\n'

pytestmark = pytest.mark.in_time


def state(status: str) -> dict[str, Any]:
    counts = {"total": 2, "completed": 2 * (status == "completed"), "failed": 0}
    return {"id": ID, "status": status, "request_counts": counts, "output_file_id": "file-1"}


@asynccontextmanager
async def serving(states: list[int | str], target: Path) -> AsyncIterator[tuple[str, list[bool]]]:
    """Answer questions for the batch so; cut the file's contents at first, and refuse them next.

    Yields:
        The URL, and whether the target was there when the contents were asked for.
    """
    was_there: list[bool] = []

    async def find(request: web.Request) -> web.StreamResponse:
        found = states.pop(0)
        if found == 0:  # the connection is cut
            assert request.transport is not None
            request.transport.close()
        if isinstance(found, int):
            return web.Response(status=found or 500)
        return web.json_response(state(found))

    async def contents(request: web.Request) -> web.StreamResponse:
        was_there.append(target.name in os.listdir(target.parent))
        if len(was_there) == 2:
            return web.Response(status=503)
        response = web.StreamResponse(headers={"Content-Length": str(len(WHOLE))})
        await response.prepare(request)
        await response.write(WHOLE[:7] if len(was_there) == 1 else WHOLE)
        if len(was_there) == 1:
            assert request.transport is not None
            request.transport.close()
        return response

    app = web.Application()
    app.router.add_get(f"/v1/batches/{ID}", find)
    app.router.add_get("/v1/files/file-1/content", contents)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/"), was_there


async def run(url: str, target: Path) -> tuple[int, str]:
    """Wait for the batch; return the exit code and what was shown."""
    console = Console(file=io.StringIO(), width=200)
    client = BatchClient(ChatClient(url))
    code = await batch._run(client, ID, target, "24h", console, lambda id_: None)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "POLL_S", 0.001)


async def test_a_server_that_is_away_for_a_while_is_asked_again(tmp_path: Path) -> None:
    target = tmp_path / "a.output.jsonl"
    # aiohttp asks a second time by itself where a connection is cut.
    states: list[int | str] = ["in_progress", 503, 0, 0, "in_progress", 502, "completed"]
    async with serving(states, target) as (url, was_there):
        code, shown = await run(url, target)
    assert code == 0
    assert shown.count("asked again in") == 5
    assert target.read_bytes() == WHOLE
    assert was_there == [False, False, False]
    assert os.listdir(tmp_path) == [target.name]


async def test_a_refusal_ends_the_wait(tmp_path: Path) -> None:
    async with serving(["in_progress", 404], tmp_path / "a") as (url, _):
        with pytest.raises(ChatError):
            await run(url, tmp_path / "a")


async def test_a_server_that_stays_away_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "GIVE_UP_S", 0.05)
    async with serving(["in_progress", *[503] * 100], tmp_path / "a") as (url, _):
        with pytest.raises(UnavailableError):
            await run(url, tmp_path / "a")
