"""What the settings of k8s/components/ingress-nginx do to Server-Sent Events, in a real nginx.

The order of events is forced, not timed: the source sends the next event only after the client has
the one before. Where nginx holds an event back, requests for something else show it: nginx has one
event loop here, and answers them after it has read the event.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from serve_app.streaming.event_stream import PING_INTERVAL_S
from serve_app.streaming.sse import DONE, PING, encode_json
from tests.deadline import in_time
from tests.k8s.live.event_source import EventSource, event_source
from tests.k8s.live.http2 import post
from tests.k8s.live.nginx import LOCALHOST, Nginx, component_directives, nginx
from tests.measured import Record

pytestmark = pytest.mark.nginx

EVENTS = [encode_json({"number": number}) for number in range(10)]
SETTINGS = component_directives()
HEADER_IGNORED = {"proxy_ignore_headers": "X-Accel-Buffering"}
"""As of an nginx whose servers may not change its buffers."""

SHORT_S = 2
"""A silence that this nginx bears, instead of a minute."""

NEVER_S = 3600.0


@asynccontextmanager
async def through(
    folder: Path, directives: Mapping[str, str], ping_interval_s: float = NEVER_S
) -> AsyncIterator[tuple[EventSource, Nginx]]:
    """Run a source of events with an nginx in front."""
    async with event_source(ping_interval_s) as source:
        with nginx(folder, [source.port], directives) as running:
            yield source, running


class Reader:
    """A client that knows which bytes have come."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.received = b""
        self._more = asyncio.Event()
        self.reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while piece := await reader.read(2**16):
            self.received += piece
            self._more.set()
        self._more.set()

    async def until(self, part: bytes, times: int = 1) -> None:
        """Wait until the answer contains this so often."""
        while self.received.count(part) < times:
            assert not self.reading.done(), "the connection has ended"
            self._more.clear()
            await self._more.wait()


@asynccontextmanager
async def asked(running: Nginx, source: EventSource) -> AsyncIterator[Reader]:
    """Ask for the stream; return the reader once the source has been asked."""
    reader, writer = await asyncio.open_connection(LOCALHOST, running.port)
    accept = b"Accept: text/event-stream\r\n"
    writer.write(b"POST /stream HTTP/1.1\r\nHost: x\r\n" + accept + b"Content-Length: 0\r\n\r\n")
    client = Reader(reader)
    await source.asked.wait()
    yield client
    writer.close()
    await client.reading


async def pass_nginx(running: Nginx) -> None:
    """Return once nginx has done all that it had to do before."""
    async with httpx.AsyncClient(base_url=f"http://{LOCALHOST}:{running.port}") as client:
        for _ in range(3):
            assert (await client.get("/quick")).text == "ok"


def only(name: str) -> dict[str, str]:
    """Return one of the component's directives, which must do without our header."""
    return {name: SETTINGS[name], **HEADER_IGNORED}


@pytest.mark.parametrize(
    "directives",
    [
        pytest.param(SETTINGS, id="the component's settings"),
        pytest.param(only("proxy_buffering"), id="no buffering"),
        pytest.param(only("proxy_http_version"), id="chunks"),
        pytest.param({}, id="our header"),
    ],
)
@in_time
async def test_each_event_reaches_the_client_before_the_next_is_sent(
    tmp_path: Path, directives: Mapping[str, str]
) -> None:
    async with through(tmp_path, directives) as (source, running), asked(running, source) as client:
        for event in EVENTS:
            await source.send(event)
            await client.until(event)
        source.end()
        await client.until(DONE)


@in_time
async def test_without_setting_and_header_nginx_holds_all_events_back_to_the_end(
    tmp_path: Path,
) -> None:
    async with (
        through(tmp_path, HEADER_IGNORED) as (source, running),
        asked(running, source) as client,
    ):
        for event in EVENTS:
            await source.send(event)
            await pass_nginx(running)
            assert client.received == b""
        source.end()
        await client.until(DONE)
        assert all(event in client.received for event in EVENTS)


@in_time
async def test_events_reach_a_client_of_http_2_one_by_one(tmp_path: Path) -> None:
    async with (
        through(tmp_path, SETTINGS) as (source, running),
        post(running.tls_port, "/stream", {}, {}) as stream,
    ):
        await source.asked.wait()
        await source.send(EVENTS[0])
        assert await stream.next("status") == 200
        await stream.read(EVENTS[0].decode())
        for event in EVENTS[1:]:
            await source.send(event)
            await stream.read(event.decode())
        source.end()
        assert await stream.rest() == DONE.decode()


@in_time
async def test_pings_keep_a_silent_stream_open_for_longer_than_nginx_bears_silence(
    tmp_path: Path,
) -> None:
    directives = {"proxy_read_timeout": f"{SHORT_S}s"}
    async with (
        through(tmp_path, directives, ping_interval_s=SHORT_S / 8) as (source, running),
        asked(running, source) as client,
    ):
        began_s = time.monotonic()
        await client.until(PING, times=12)
        assert time.monotonic() - began_s > SHORT_S
        source.end()
        await client.until(DONE)


@in_time
async def test_without_pings_nginx_cuts_a_silent_stream(tmp_path: Path) -> None:
    directives = {"proxy_read_timeout": f"{SHORT_S}s"}
    async with through(tmp_path, directives) as (source, running), asked(running, source) as client:
        await source.send(EVENTS[0])
        await client.until(EVENTS[0])
        await client.reading  # nginx closes the connection
        assert not client.received.endswith(b"0\r\n\r\n"), "a whole body ends so"
        assert "upstream timed out" in running.log.read_text()


@in_time
async def test_a_request_that_a_pod_has_received_is_sent_to_no_other(tmp_path: Path) -> None:
    requests = []

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async with (
        await asyncio.start_server(die, LOCALHOST, 0) as first,
        await asyncio.start_server(die, LOCALHOST, 0) as second,
    ):
        ports = [server.sockets[0].getsockname()[1] for server in (first, second)]
        with nginx(tmp_path, ports, SETTINGS) as running:
            url = f"http://{LOCALHOST}:{running.port}/v1/chat/completions"
            async with httpx.AsyncClient() as client:
                answer = await client.post(url, json={})
    assert answer.status_code == 502
    assert len(requests) == 1


@in_time
async def test_another_pod_is_asked_when_one_does_not_listen(tmp_path: Path) -> None:
    async with event_source() as source:
        with socket.socket() as gone:
            gone.bind((LOCALHOST, 0))  # bound, but nothing listens
            ports = [gone.getsockname()[1], source.port]
            with nginx(tmp_path, ports, SETTINGS) as running:
                async with httpx.AsyncClient() as client:
                    for _ in range(4):
                        answer = await client.get(f"http://{LOCALHOST}:{running.port}/quick")
                        assert answer.text == "ok"


@pytest.mark.soak
async def test_streams_are_silent_for_20_minutes(tmp_path: Path, record: Record) -> None:
    """With pings in an nginx that bears a minute; without any in one with our settings."""
    silent_s = 20 * 60
    folders = tmp_path / "pings", tmp_path / "settings"
    async with (
        through(folders[0], {}, PING_INTERVAL_S) as (pinged, first),
        through(folders[1], SETTINGS) as (silent, second),
        asked(first, pinged) as client,
        asked(second, silent) as other,
    ):
        await silent.send(EVENTS[0])
        await other.until(EVENTS[0])
        num_received = len(other.received)
        began_s = time.monotonic()
        await client.until(PING, times=int(silent_s / PING_INTERVAL_S))
        record("minutes of silence", round((time.monotonic() - began_s) / 60, 1))
        assert len(other.received) == num_received
        for source, reader in ((pinged, client), (silent, other)):
            source.end()
            await reader.until(DONE)
