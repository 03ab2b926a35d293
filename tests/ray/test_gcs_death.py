"""Ray's GCS is killed and started again, with Redis behind it, as on a cluster: serving goes on."""

import asyncio
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.free_port import free_port
from tests.faults.served.answer import assert_equal, opened, read
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.replicas import DEADLINE_S, reached
from tests.ray.serve_run import Server, haproxy_environment, serving, shipped_config

NUM_ROUNDS = 3
RECONNECT_TIMEOUT_S = 300
"""How long a node waits for GCS; Ray's own 60 s are short for a test on a busy machine."""

BODIES = [about("os.stat", **SEEDED | {"seed": i}, max_tokens=400) for i in range(4)]
SHORT = about("os.walk", max_tokens=50)

pytestmark = [pytest.mark.redis, pytest.mark.soak]


@contextmanager
def running(command: Sequence[str], **options: object) -> Iterator[None]:
    """Run a program in the background, without its output, and kill it at the end."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **options,  # type: ignore[call-overload] # the types depend on the options
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Start `make serve`'s server on a Ray that keeps its state in Redis."""
    port = str(free_port())
    only_in_memory = ("--save", "", "--appendonly", "no")
    with running(
        ["redis-server", "--port", port, "--bind", "127.0.0.1", *only_in_memory], cwd=tmp_path
    ):
        environment = {**os.environ, "HOME": str(tmp_path)} | haproxy_environment()
        environment["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{port}"
        environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(RECONNECT_TIMEOUT_S)
        started = Server(shipped_config(tmp_path), tmp_path / "serve.log", environment)
        with serving(started) as server:
            yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as client:
        yield client


def command_of_gcs(server: Server, gcs: psutil.Process) -> list[str]:
    """Return a command that starts GCS again, on the port that it had chosen."""
    (raylet,) = server.processes("raylet/raylet")
    port = re.search(r"--gcs-address=\S+:(\d+)", " ".join(raylet.cmdline()))
    assert port is not None
    return [re.sub("(--gcs_server_port)=0", rf"\1={port[1]}", each) for each in gcs.cmdline()]


async def test_serving_goes_on_without_gcs_and_control_comes_back_with_it(
    server: Server, client: httpx.AsyncClient, record_property: Callable[[str, object], None]
) -> None:
    expected = await asyncio.gather(*(read(client, body) for body in BODIES))
    short = await read(client, SHORT)
    (gcs,) = server.processes("gcs_server")
    command, environment = command_of_gcs(server, gcs), gcs.environ()
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(opened(client, body)) for body in BODIES]
        await streams[-1].read_tokens(10)
        gcs.kill()
        assert_equal(await asyncio.gather(*(each.read_to_end() for each in streams)), expected)
    for _ in range(NUM_ROUNDS):
        assert_equal([await read(client, SHORT)], [short])
        for path in ("/live", "/ready", "/health"):
            assert (await client.get(path)).status_code == 200, path
    with running(command, env=environment):
        (replica,) = server.processes("ray::ServeReplica:raystream:pydoc-chat")
        replica.kill()
        began_s = time.monotonic()
        answer = await read(client, BODIES[0])
        record_property(
            "until a killed replica's successor had answered, s", time.monotonic() - began_s
        )
        assert_equal([answer], expected[:1])
        (successor,) = server.processes("ray::ServeReplica:raystream:pydoc-chat")
        assert successor.pid != replica.pid
        await reached(server.is_ready)
