"""A server without keys that listens only on this machine, and the names by which it is asked."""

import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from serve_app.keys.api_keys import KeyRing
from tests.serve_app.apps import ALICE, CHAT, bearer, client_of, question, ring
from tests.serve_app.asgi_socket import AsgiSocket
from tests.serve_app.fakes import FakeBackend

FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "EVIL.example.",
    "1.2.3.4.5",
    "[::1",
]
OWN = [
    "127.0.0.1",
    "127.0.0.1:8000",
    "[::1]:8000",
    "192.168.1.7:8000",
    "localhost:8000",
    "LocalHost",
    "localhost.",
    "my-machine:8000",
    "chat.localhost:8000",
    "box.local",
    "host.docker.internal:8000",
    "chat.example.org",
    "Chat.Example.org:443",
]


def app_of(
    keys: KeyRing | None = None, host: str = "127.0.0.1", **auth: object
) -> tuple[FakeBackend, FastAPI]:
    """Return an application as one serves it that listens on this host, and its model."""
    backend = FakeBackend()
    models = [{"id": "m", "source": "nowhere"}]
    config = AppConfig.model_validate({"models": models, "auth": auth})
    return backend, build_app(AppParts(config, {"m": backend}, keys=keys, host=host))


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/", "/metrics", "/nowhere"])
@pytest.mark.parametrize("host", FOREIGN)
async def test_a_name_that_a_web_page_may_have_is_refused(host: str, path: str) -> None:
    backend, app = app_of(allowed_hosts=["chat.example.org"])
    async with client_of(app) as client:
        answer = await client.request(
            "POST" if path == CHAT else "GET", path, headers={"host": host}
        )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (403, "foreign_host")
    assert "auth.allowed_hosts" in error["message"]
    assert backend.num_calls == 0


@pytest.mark.parametrize("host", OWN)
async def test_a_name_that_no_web_page_can_have_is_served(host: str) -> None:
    _, app = app_of(allowed_hosts=["chat.example.org"])
    async with client_of(app) as client:
        answer = await client.post(CHAT, json=question(), headers={"host": host})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("keys", "host", "auth"),
    [
        (ring(), "127.0.0.1", {}),
        (None, "127.0.0.1", {"allow_anonymous": True}),
        (None, "0.0.0.0", {"allow_anonymous": True}),
    ],
    ids=["keys", "for everybody here", "for everybody"],
)
async def test_a_server_that_asks_for_keys_or_serves_everybody_has_any_name(
    keys: KeyRing | None, host: str, auth: dict[str, object]
) -> None:
    _, app = app_of(keys, host, **auth)
    headers = {"host": "chat.example.org", **bearer(ALICE)}
    async with client_of(app) as client:
        answer = await client.post(CHAT, json=question(), headers=headers)
    assert answer.status_code == 200


async def test_a_page_that_was_pointed_here_may_open_no_websocket() -> None:
    _, app = app_of()
    page = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    async with AsgiSocket(app, headers=page) as socket:
        status, body = socket.denial
    assert (status, body["error"]["code"]) == (403, "foreign_host")


async def test_a_request_without_a_host_is_served() -> None:
    """HTTP/1.0, and HAProxy's checks: browsers always send one."""
    _, app = app_of()
    async with client_of(app) as client:
        request = client.build_request("GET", "/v1/models")
        del request.headers["host"]
        assert (await client.send(request)).status_code == 200


@pytest.mark.parametrize(
    "name", ["https://chat.example.org", "chat.example.org:443", "*", "Chat.x"]
)
def test_an_allowed_host_is_a_name_in_lower_case(name: str) -> None:
    with pytest.raises(ValidationError):
        AppConfig.model_validate({"auth": {"allowed_hosts": [name]}})
