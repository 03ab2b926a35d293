import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.free_port import free_port
from deployments.contract.errors import ReplicaUnavailableError
from serve_app.commands.run.haproxy_errors import MESSAGES, error_body, with_json_errors
from serve_app.http.errors import error_payload
from tests.raw_http import LOCALHOST, exchange, head, parsed, values
from tests.serve_app.front_doors import behind_haproxy


def test_the_errors_have_our_shape() -> None:
    for status, message in MESSAGES.items():
        assert "'" not in message
        assert json.loads(error_body(status)) == error_payload(ReplicaUnavailableError(message))


def test_only_error_files_are_replaced() -> None:
    kept = "defaults\n    mode http\n    # errorfile 503 is Ray's\n    errorfile 500 /a\n"
    assert with_json_errors(kept) == kept
    changed = with_json_errors(f"{kept}    errorfile 503 /b\n")
    assert changed.startswith(f"{kept}    http-error status 503 content-type application/json ")
    assert changed.count("\n") == kept.count("\n") + 1


@pytest.mark.slow
async def test_a_server_without_replicas_answers_with_our_503(tmp_path: Path) -> None:
    async with behind_haproxy(free_port(), tmp_path) as port:
        response, body = parsed(await exchange(port, head("GET", "/v1/models")))
    assert response.status_code == 503
    assert values(response, b"content-type") == [b"application/json"]
    assert values(response, b"retry-after") == [b"1"]
    assert body.decode() == error_body(503)


@pytest.mark.slow
async def test_a_replica_that_dies_at_a_request_leaves_our_502(tmp_path: Path) -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if b" /version " in request:  # the health check
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(die, LOCALHOST, 0) as server:
        replica: int = server.sockets[0].getsockname()[1]
        async with behind_haproxy(replica, tmp_path) as port:
            response, body = parsed(await exchange(port, head("GET", "/v1/models")))
    assert response.status_code == 502
    assert body.decode() == error_body(502)
