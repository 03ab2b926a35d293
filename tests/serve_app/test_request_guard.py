from collections.abc import AsyncIterator

import httpx
import pytest

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


async def endless(num_pieces: int) -> AsyncIterator[bytes]:
    for _ in range(num_pieces):
        yield b" " * 1024


async def test_a_body_that_announces_too_much_is_refused_unread(client: httpx.AsyncClient) -> None:
    answer = await client.post(CHAT, content=b" " * 65537, headers=JSON)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-request-id"]


async def test_a_body_that_announces_nothing_is_refused_while_it_is_read(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.post(CHAT, content=endless(65), headers=JSON)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


async def test_a_body_of_just_the_limit_is_read(client: httpx.AsyncClient) -> None:
    answer = await client.post(CHAT, content=endless(64), headers=JSON)
    assert "not JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize("length", ["9" * 5000, "65537"])
async def test_an_absurd_length_is_refused(client: httpx.AsyncClient, length: str) -> None:
    answer = await client.post(CHAT, content=b"{}", headers={**JSON, "content-length": length})
    assert answer.status_code == 413


@pytest.mark.parametrize("header", ["x-request-disconnect-disabled", "X-Request-Timeout-Seconds"])
async def test_a_header_that_commands_ray_serve_is_refused(
    client: httpx.AsyncClient, header: str
) -> None:
    answer = await client.get("/v1/models", headers={header: "?1"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == header.lower()
