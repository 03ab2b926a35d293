"""Attacks on access control: paths without keys, Ray's ports, headers that control Ray Serve."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from k8s.make_base import BASE
from serve_app.commands.check.check import find_problems
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from serve_app.middleware.auth import OPEN_PATHS, READING
from serve_app.playground.page import PAGE_PATHS
from tests.serve_app.apps import ALICE, CHAT, bearer, client_of, make_app, question, ring
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fakes import FakeBackend, FakeClock

ROOT = Path(__file__).resolve().parents[2]
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "X"]


async def test_cve_2026_48746_every_path_and_method_needs_a_key(backend: FakeBackend) -> None:
    app = make_app(backend, ring())
    known = [path for path in app.openapi()["paths"] if path not in OPEN_PATHS]
    others = ["/docs", "/redoc", "/openapi.json", "/metrics", "/playground", "", "*", "//health"]
    answered = []
    for method in METHODS:
        # The page is there to be read.
        page = [] if method in READING else sorted(PAGE_PATHS)
        for path in [*known, *others, *page]:
            async with AsgiCall(app, path, {}, method=method) as call:
                await call.end()
            if call.sent[0]["status"] != 401:
                answered.append((method, path, call.sent[0]["status"]))
    assert answered == []
    assert backend.requests == []


async def test_cve_2026_48746_headers_do_not_change_which_paths_are_open(
    backend: FakeBackend,
) -> None:
    claims = {
        "host": "test/health",
        "x-forwarded-prefix": "/health",
        "x-forwarded-path": "/health",
        "x-original-url": "/health",
        "x-rewrite-url": "/health",
        "referer": "http://test/health",
    }
    async with client_of(make_app(backend, ring())) as client:
        for name, value in claims.items():
            assert (await client.get("/v1/models", headers={name: value})).status_code == 401


def test_cve_2023_48022_a_server_without_keys_does_not_start_on_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAYSTREAM_API_KEYS", raising=False)
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    assert document["http_options"]["host"] == "127.0.0.1"
    auth = document["applications"][0]["args"]["auth"]
    without = dict(auth)
    for host in ("0.0.0.0", "::0", "192.168.1.5", "example.com"):
        document["http_options"]["host"] = host
        (problem,) = find_problems(yaml.safe_dump(document))
        assert "allow_anonymous: true" in problem, host
        auth["allow_anonymous"] = True
        assert find_problems(yaml.safe_dump(document)) == [], host
        auth.update(allow_anonymous=False, api_keys_file="/etc/keys.yaml")
        assert find_problems(yaml.safe_dump(document)) == [], host
        auth.clear()
        auth.update(without)


def test_cve_2023_48022_cve_2025_62593_cve_2026_27482_rays_ports_need_a_token() -> None:
    service = yaml.safe_load((BASE / "rayservice.yaml").read_text())
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    policy = yaml.safe_load((BASE / "network-policy.yaml").read_text())
    open_to_all = [rule["ports"] for rule in policy["spec"]["ingress"] if "from" not in rule]
    assert open_to_all == [[{"protocol": "TCP", "port": 8000}]]


@pytest.mark.parametrize("header", ["x-request-disconnect-disabled", "x-request-timeout-seconds"])
async def test_headers_that_control_ray_serve_are_refused(
    backend: FakeBackend, header: str
) -> None:
    async with client_of(make_app(backend, ring())) as client:
        answer = await client.post(
            CHAT, json=question(), headers={**bearer(ALICE), header: "0.001"}
        )
    assert answer.status_code == 400
    assert backend.requests == []


async def test_a_request_id_that_could_harm_a_log_is_replaced(backend: FakeBackend) -> None:
    async with client_of(make_app(backend)) as client:
        for given in ("x" * 65, "a b", "a\tb", "a;b", "<b>", "\u00e9", "a\x1b[31m"):
            answer = await client.post(
                CHAT, json=question(), headers=httpx.Headers([(b"x-request-id", given.encode())])
            )
            assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"]), given
            assert backend.requests[-1].request_id == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("limits", "sent", "status"),
    [
        ({"max_header_bytes": 1024}, {"headers": {"x-large": "x" * 1024}}, 431),
        ({"max_body_bytes": 1024}, {"body": question(user="x" * 1024)}, 413),
        ({"max_body_bytes": 2048}, {"headers": {"content-length": "2049"}}, 413),
        ({"max_body_read_s": 0.01}, {"more_body": True}, 408),
    ],
    ids=["headers", "body", "length", "time"],
)
async def test_the_size_of_headers_and_body_and_the_bodys_time_are_bounded(
    backend: FakeBackend, limits: dict[str, float], sent: dict[str, Any], status: int
) -> None:
    app = make_app(backend, ring(), limits=limits)
    sent = {"body": question(), **sent, "headers": {**sent.get("headers", {}), **bearer(ALICE)}}
    async with AsgiCall(app, CHAT, **sent) as call:
        await call.end()
    assert call.sent[0]["status"] == status
    assert f"limits.{next(iter(limits))}".encode() in call.body
    assert backend.requests == []


async def test_a_request_without_a_key_is_refused_before_its_body_has_come(
    backend: FakeBackend,
) -> None:
    async with AsgiCall(make_app(backend, ring()), CHAT, None, more_body=True) as call:
        await call.end()
    assert call.sent[0]["status"] == 401


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.parametrize("allowed", [["https://chat.test"], ["*"]])
async def test_only_pages_of_allowed_origins_may_call_from_a_browser(
    backend: FakeBackend, allowed: list[str]
) -> None:
    models = [{"id": "m", "source": "nowhere"}]
    config = AppConfig.model_validate({"models": models, "cors": {"allowed_origins": allowed}})
    app = build_app(AppParts(config, {"m": backend}, clock=FakeClock(), keys=ring()))
    async with client_of(app) as client:
        for origin in ("https://chat.test", "https://evil.test"):
            preflight = await client.options(CHAT, headers={"origin": origin, **PREFLIGHT})
            refused = await client.post(CHAT, json=question(), headers={"origin": origin})
            answer = await client.post(
                CHAT, json=question(stream=True), headers={"origin": origin, **bearer(ALICE)}
            )
            assert (refused.status_code, answer.status_code) == (401, 200)
            found = {each.headers.get("access-control-allow-origin") for each in (refused, answer)}
            if allowed == ["*"] or origin in allowed:
                assert preflight.status_code == 200
                told = preflight.headers["access-control-allow-headers"].lower()
                assert {"authorization", "content-type"} == set(told.split(","))
                assert found == {"*" if allowed == ["*"] else origin}
                assert answer.headers["access-control-expose-headers"] == "*"
            else:
                assert preflight.status_code == 400
                assert found == {None}
            assert "access-control-allow-credentials" not in answer.headers


async def test_pages_of_other_origins_get_no_cors_headers(backend: FakeBackend) -> None:
    asked = {"origin": "https://evil.test", "access-control-request-method": "POST"}
    async with client_of(make_app(backend)) as client:
        preflight = await client.options(CHAT, headers=asked)
        answer = await client.post(CHAT, json=question(), headers={"origin": "https://evil.test"})
    assert preflight.status_code == 405
    for one in (preflight, answer):
        assert not [name for name in one.headers if name.startswith("access-control")]
