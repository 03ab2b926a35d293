from urllib.parse import unquote

import pytest
from starlette.types import Message

from serve_app.middleware.auth import UnprotectedServerError, is_loopback, require_protection
from tests.offenders import every
from tests.serve_app.apps import ALICE, BOB, CHAT, bearer, client_of, key, make_app, question, ring
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fakes import FakeBackend


async def test_a_known_key_lets_a_request_in(backend: FakeBackend) -> None:
    async with client_of(make_app(backend, ring())) as client:
        for headers in (
            bearer(ALICE),
            bearer(BOB),
            {"authorization": f"bearer  {ALICE}"},
            {"x-api-key": ALICE},
        ):
            answer = await client.post(CHAT, json=question(), headers=headers)
            assert answer.status_code == 200


OTHER_CREDENTIALS: list[tuple[dict[str, str], str | None]] = [
    ({}, 'Bearer realm="raystream"'),
    ({"authorization": ""}, 'Bearer realm="raystream"'),
    ({"authorization": f"Basic {ALICE}"}, 'Bearer realm="raystream"'),
    ({"authorization": ALICE}, 'Bearer realm="raystream"'),
    (bearer("wrong"), 'Bearer realm="raystream", error="invalid_token"'),
    (bearer(""), 'Bearer realm="raystream", error="invalid_token"'),
    (bearer(ALICE + "x"), 'Bearer realm="raystream", error="invalid_token"'),
    (bearer(key("a", ALICE).sha256), 'Bearer realm="raystream", error="invalid_token"'),
    ({"x-api-key": "wrong"}, 'Bearer realm="raystream", error="invalid_token"'),
    ({"authorization": "Bearer wrong", "x-api-key": ALICE}, None),
]


async def test_any_other_credentials_are_refused_in_openais_shape(backend: FakeBackend) -> None:
    app = make_app(backend, ring())
    for case in every(OTHER_CREDENTIALS):
        with case as (headers, challenge):
            async with client_of(app) as client:
                answer = await client.post(CHAT, json=question(), headers=headers)
            assert answer.status_code == 401
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            assert answer.headers["x-should-retry"] == "false"
            assert answer.headers["x-request-id"]
            assert challenge is None or answer.headers["www-authenticate"] == challenge
            assert ALICE not in answer.text
            assert backend.requests == []


@pytest.mark.parametrize("path", ["/health", "/live", "/ready"])
async def test_health_and_readiness_need_no_key(backend: FakeBackend, path: str) -> None:
    async with client_of(make_app(backend, ring())) as client:
        assert (await client.get(path)).status_code == 200


CLOSED_PATHS: list[tuple[str, str]] = [
    ("POST", "/"),
    ("GET", "/docs"),
    ("GET", "/redoc"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/m"),
    ("GET", "/v1/models/../../health"),
    ("GET", "/nowhere"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/health/x"),
    ("GET", "/Health"),
    ("GET", "/health%2f"),
    ("GET", "/health%00"),
    ("GET", "/x/../ready"),
    ("GET", "/v1/models?path=/health"),
    ("DELETE", CHAT),
    ("OPTIONS", CHAT),
    ("HEAD", "/docs"),
    ("TRACE", "/"),
    ("POST", "/text-generation"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
]


async def test_every_other_path_needs_a_key(backend: FakeBackend) -> None:
    app = make_app(backend, ring())
    for case in every(CLOSED_PATHS):
        # Clients normalize a path before they send it; `AsgiCall` sends it as it is.
        with case as (method, path):
            async with AsgiCall(app, unquote(path), {}, method=method) as call:
                await call.end()
            assert call.sent[0]["status"] == 401


async def test_a_host_header_does_not_change_the_path(backend: FakeBackend) -> None:
    async with client_of(make_app(backend, ring())) as client:
        answer = await client.get("/v1/models", headers={"host": "test/health?"})
    assert answer.status_code == 401


async def test_all_routes_of_the_application_but_two_need_a_key(backend: FakeBackend) -> None:
    app = make_app(backend, ring())
    paths = list(app.openapi()["paths"])
    assert len(paths) > 4
    async with client_of(app) as client:
        open_paths = [path for path in paths if (await client.get(path)).status_code != 401]
    assert sorted(open_paths) == ["/health", "/live", "/ready"]


async def test_websockets_are_closed(backend: FakeBackend) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/health", "headers": [], "query_string": b""}
    await make_app(backend, ring())(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_without_configured_keys_no_request_needs_one(backend: FakeBackend) -> None:
    async with client_of(make_app(backend)) as client:
        assert (await client.post(CHAT, json=question())).status_code == 200
        answer = await client.post(CHAT, json=question(), headers=bearer("whatever"))
        assert answer.status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_only_a_loopback_address_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    require_protection(host, has_keys=False, allow_anonymous=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", None, "10.0.0.1", "example.com", "::2"])
def test_other_addresses_need_keys_or_allow_anonymous(host: str | None) -> None:
    require_protection(host, has_keys=True, allow_anonymous=False)
    require_protection(host, has_keys=False, allow_anonymous=True)
    with pytest.raises(
        UnprotectedServerError, match=r"allow_anonymous: true.*raystream new-key|raystream new-key"
    ):
        require_protection(host, has_keys=False, allow_anonymous=False)
