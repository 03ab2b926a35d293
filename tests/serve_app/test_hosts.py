"""Who reaches a server, by its host, and that HAProxy asks no replica of another server.

HAProxy and the replica behind it listen as Serve starts them, without Ray.
"""

import asyncio
import csv
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.commands.check.ray_check import host_problem
from serve_app.middleware.auth import is_loopback
from serve_app.middleware.replica_header import HEALTH_PATH, haproxy_name
from serve_app.middleware.server_edge import MISDIRECTED
from tests.offenders import every
from tests.raw_http import DEADLINE_S, exchange, head, parsed
from tests.serve_app.front_doors import behind_haproxy, on_uvicorn

SECURITY = Path(__file__).resolve().parents[2] / "docs" / "security.md"
OURS = "SERVE_REPLICA::raystream#Ingress#ours"
THEIRS = "SERVE_REPLICA::raystream#Ingress#theirs"

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def addresses(family: socket.AddressFamily) -> list[str]:
    """Return the machine's addresses of a family that other machines can reach."""
    found = (each for found in psutil.net_if_addrs().values() for each in found)
    own = [each.address for each in found if each.family == family]
    return [each for each in own if not is_loopback(each) and host_problem(each) is None]


OWN = {
    "the machine's IPv4 address": next(iter(addresses(socket.AF_INET)), None),
    "the machine's IPv6 address": next(iter(addresses(socket.AF_INET6)), None),
}
"""What stands in the table for an address that differs between machines; None if there is none."""


def rows() -> Iterator[tuple[str, list[str], str]]:
    """Yield of each row of docs/security.md the host, where it is reached, and its keys."""
    section = SECURITY.read_text().split("## Which host\n")[1].split("\n## ")[0]
    for line in re.findall(r"^\| (?!host|---).*", section, re.MULTILINE):
        host, reached, _, keys = re.split(r" *\| *", line)[1:-1]
        places = [actual(place) for place in reached.split(", ") if place != "none"]
        address = actual(host)
        if address is not None:
            yield address, [place for place in places if place is not None], keys


def actual(told: str) -> str | None:
    return OWN[told] if told in OWN else told.strip("`")


class Replica:
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != HEALTH_PATH:
            self.num_requests += 1
        answer: ASGIApp = PlainTextResponse("ours")
        await answer(scope, receive, send)


async def status_at(address: str, port: int) -> int | None:
    """Return the status of an answer; None if nothing listens there."""
    try:
        return parsed(await exchange(port, head(), address))[0].status_code
    except OSError:
        return None


async def check_status(folder: Path) -> str:
    """Return what HAProxy's first finished check of the replica has found, such as `L7OK`."""
    socket_ = folder / "admin.sock"
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if not socket_.exists():  # HAProxy gives it its name last
                await asyncio.sleep(0.02)
                continue
            reader, writer = await asyncio.open_unix_connection(socket_)
            writer.write(b"show stat\n")
            table = (await reader.read()).decode().removeprefix("# ").splitlines()
            writer.close()
            (server,) = [
                row for row in csv.DictReader(table) if row["svname"] == haproxy_name(OURS)
            ]
            # HAProxy marks a check that runs by an asterisk.
            if server["check_status"] not in ("", "INI") and "*" not in server["check_status"]:
                return server["check_status"]


async def test_each_host_is_reached_where_the_table_says_and_nowhere_else(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["127.0.0.1", "127.0.0.2", "::1", *filter(None, OWN.values())]
    for case in every(rows()):
        with case as (host, expected, keys):
            assert (keys == "needed") == (not is_loopback(host) and bool(expected))
            assert (host_problem(host) is None) == bool(expected)
            if not expected:
                continue
            folder = tmp_path_factory.mktemp("haproxy")
            async with (
                on_uvicorn(Replica(), monkeypatch, host=host, actor=OURS) as port,
                behind_haproxy(
                    port, folder, health_path=HEALTH_PATH, host=host, actor=OURS
                ) as front,
            ):
                assert await check_status(folder) == "L7OK"
                statuses = {address: await status_at(address, front) for address in asked}
            assert {address for address in asked if statuses[address] == 200} == set(expected)
            assert {statuses[address] for address in asked} <= {200, None}


@pytest.mark.parametrize("actor", [THEIRS, None])
async def test_a_replica_of_another_server_gets_no_requests(
    actor: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HAProxy takes a replica for healthy until it has failed some checks."""
    replica = Replica()
    async with (
        on_uvicorn(replica, monkeypatch, actor=actor) as port,
        behind_haproxy(port, tmp_path, health_path=HEALTH_PATH, actor=OURS) as front,
        asyncio.timeout(DEADLINE_S),
    ):
        while True:
            response, body = parsed(await exchange(front, head()))
            if response.status_code == 503 and MISDIRECTED.encode() not in body:
                break
            assert (response.status_code == 503) == (actor is THEIRS)
    assert replica.num_requests == 0 or actor is None


async def test_a_request_for_the_replica_that_had_the_port_before_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica()
    line = b"X-Raystream-Replica: SERVE_REPLICA_raystream-Ingress-"
    async with on_uvicorn(replica, monkeypatch, actor=OURS) as port:
        for name, status in ((b"ours", 200), (b"gone", 503)):
            response, body = parsed(await exchange(port, head("GET", "/", "1.1", line + name)))
            assert response.status_code == status
            assert (b'"replica_unavailable"' in body) == (status == 503)
    assert replica.num_requests == 1
