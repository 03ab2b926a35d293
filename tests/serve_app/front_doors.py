"""Serve's front doors without Ray: uvicorn as Serve starts it, with or without HAProxy."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvicorn
from ray.serve._private import http_util
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from starlette.types import ASGIApp

from benchmarks.free_port import free_port
from serve_app.commands.run.announcement import local_url
from serve_app.commands.server_environment import MIDDLEWARE, SERVER_EDGE, free_ports
from serve_app.middleware import server_edge
from serve_app.middleware.replica_header import haproxy_name
from serve_app.shipped_files import parse_env
from tests.raw_http import DEADLINE_S, LOCALHOST

ROOT = Path(__file__).resolve().parents[2]
SWITCHES = parse_env((ROOT / "serve.env").read_text())
BUFSIZE = int(SWITCHES["RAY_SERVE_HAPROXY_TUNE_BUFSIZE"])


@asynccontextmanager
async def on_uvicorn(
    app: ASGIApp,
    monkeypatch: pytest.MonkeyPatch,
    *,
    host: str = LOCALHOST,
    actor: str | None = None,
) -> AsyncIterator[int]:
    """Serve the application as Serve's proxies and replicas do; yield the port.

    `actor` is the name of the replica; None if it tells none.
    """
    monkeypatch.setattr(http_util, MIDDLEWARE, SWITCHES[MIDDLEWARE])
    monkeypatch.setattr(server_edge, "own_actor_name", lambda: actor)
    # The handlers that uvicorn would restore later are those of the loop's run that started it.
    monkeypatch.setattr(uvicorn.Server, "capture_signals", lambda server: nullcontext())
    options = HTTPOptions(host=host, port=free_port())
    options = http_util.configure_http_middlewares(
        http_util.configure_http_options_with_defaults(options)
    )
    loop = asyncio.get_running_loop()
    task, server = await http_util.start_asgi_http_server(app, options, event_loop=loop)
    try:
        await wait_until_open(options.port, reached_at(host))
        yield options.port
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def behind_haproxy(
    port: int,
    folder: Path,
    bufsize: int = BUFSIZE,
    health_path: str = "/version",
    *,
    host: str = LOCALHOST,
    actor: str | None = None,
) -> AsyncIterator[int]:
    """Put HAProxy with Ray's configuration before a replica of its node; yield HAProxy's own port.

    `bufsize` is its buffer in bytes, `health_path` where the replica is asked for its health, and
    `actor` the replica's name; None if HAProxy is not to ask for it.
    """
    ours, stats, metrics = free_ports(3)
    config = HAProxyConfig(
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        stats_port=stats,
        metrics_port=metrics,
        http_options=HTTPOptions(host=host, port=ours),
        has_received_routes=True,
        has_received_servers=True,
        is_head=True,
        metrics_enabled=False,
        bufsize=bufsize,
    )
    backend = BackendConfig(
        name="raystream",
        app_name="raystream",
        path_prefix="/",
        http_health_check_path=health_path,
        servers=[ServerConfig(name=haproxy_name(actor or "ingress"), host=LOCALHOST, port=port)],
    )
    file = folder / "haproxy.cfg"
    HAProxyApi(config, {"raystream": backend}, str(file))._generate_config_file_internal()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "serve_app.commands.run.haproxy", "-f", str(file), "-db"),
        env={**os.environ, "PYTHONPATH": str(ROOT), MIDDLEWARE: SERVER_EDGE if actor else ""},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await wait_until_open(ours, reached_at(host))
        yield ours
    finally:
        process.terminate()
        await process.wait()


def reached_at(host: str) -> str:
    """Return the address at which this machine reaches a host of `http_options`."""
    return urlsplit(local_url(host, 1, "/")).hostname or ""


async def wait_until_open(port: int, address: str = LOCALHOST) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(address, port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return
