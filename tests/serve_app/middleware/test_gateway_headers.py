"""The headers of a gateway stand for tenant and priority where the file says that it is trusted."""

from collections.abc import Mapping
from typing import Any, Final

import pytest

from deployments.contract.claims import Claim
from serve_app.keys.api_keys import KeyRing
from serve_app.middleware.gateway_headers import MAX_TENANT_LENGTH
from tests.serve_app.apps import (
    ALICE,
    BOB,
    CHAT,
    access_lines,
    bearer,
    client_of,
    key,
    make_app,
    question,
)
from tests.serve_app.asgi_socket import AsgiSocket
from tests.serve_app.fakes import FakeBackend

KEYS: Final = KeyRing((key("alice", ALICE, weight=2), key("bob", BOB, priority=1)))
TRUSTED: Final = {"trusted_gateway": True, "objectives": {"chat": -10, "batch": 5}}
NEW, OLD = "x-llm-d-inference-", "x-gateway-inference-"


async def ask(
    backend: FakeBackend,
    headers: Mapping[str, str],
    auth: Mapping[str, object] = TRUSTED,
    keys: KeyRing | None = None,
    **fields: object,
) -> tuple[int, Any]:
    """Return the status, and the request's claim or else the error."""
    backend.requests.clear()
    async with client_of(make_app(backend, keys, auth=auth)) as client:
        answer = await client.post(CHAT, json=question(**fields), headers=dict(headers))
    claims = [request.claim for request in backend.requests]
    return answer.status_code, claims[0] if claims else answer.json()["error"]


@pytest.mark.parametrize("prefix", [NEW, OLD])
async def test_the_headers_name_tenant_and_priority(backend: FakeBackend, prefix: str) -> None:
    headers = {f"{prefix}fairness-id": "tenant-a", f"{prefix}objective": "batch"}
    assert await ask(backend, headers) == (200, Claim(5, "gateway:tenant-a"))


async def test_the_newer_header_goes_before_the_older(backend: FakeBackend) -> None:
    headers = {
        f"{OLD}fairness-id": "old",
        f"{NEW}fairness-id": "new",
        f"{OLD}objective": "batch",
        f"{NEW}objective": "chat",
    }
    assert await ask(backend, headers) == (200, Claim(-10, "gateway:new"))


async def test_without_a_trusted_gateway_the_headers_are_ignored(backend: FakeBackend) -> None:
    headers = {
        f"{prefix}{name}": value
        for prefix in (NEW, OLD)
        for name, value in (("fairness-id", "a" * 1000), ("objective", "chat"))
    }
    assert await ask(backend, headers, {}) == (200, Claim())
    assert await ask(backend, headers | bearer(BOB), {}, KEYS) == (200, Claim(1, "bob"))


async def test_what_the_gateway_leaves_out_is_as_the_key_says(backend: FakeBackend) -> None:
    tenant, unknown = {f"{NEW}fairness-id": "t"}, {f"{NEW}objective": "other"}
    assert await ask(backend, {}, keys=None) == (200, Claim())
    assert await ask(backend, bearer(ALICE), keys=KEYS) == (200, Claim(0, "alice", 2))
    assert await ask(backend, tenant | bearer(ALICE), keys=KEYS) == (200, Claim(0, "gateway:t", 2))
    assert await ask(backend, unknown | bearer(BOB), keys=KEYS) == (200, Claim(1, "bob"))
    assert await ask(backend, {f"{NEW}fairness-id": " "}) == (200, Claim())


async def test_a_tenant_named_as_a_key_is_another_tenant(backend: FakeBackend) -> None:
    headers = {f"{NEW}fairness-id": "bob"}
    assert await ask(backend, headers | bearer(ALICE), keys=KEYS) == (
        200,
        Claim(0, "gateway:bob", 2),
    )
    assert await ask(backend, bearer(BOB), keys=KEYS) == (200, Claim(1, "bob"))


async def test_an_objective_bounds_the_body_in_the_place_of_the_key(backend: FakeBackend) -> None:
    headers = {f"{NEW}objective": "chat"} | bearer(BOB)
    assert await ask(backend, headers, keys=KEYS) == (200, Claim(-10, "bob"))
    assert await ask(backend, headers, keys=KEYS, priority=-10) == (200, Claim(-10, "bob"))
    assert await ask(backend, headers, keys=KEYS, priority=9) == (200, Claim(9, "bob"))
    status, error = await ask(backend, headers, keys=KEYS, priority=-11)
    assert (status, error["param"]) == (400, "priority")
    assert "The gateway's objective 'chat' allows the priority -10 and higher" in error["message"]


async def test_a_fairness_id_that_is_too_long_is_refused(backend: FakeBackend) -> None:
    longest = {f"{NEW}fairness-id": "a" * MAX_TENANT_LENGTH}
    assert await ask(backend, longest) == (200, Claim(0, "gateway:" + "a" * MAX_TENANT_LENGTH))
    status, error = await ask(backend, {f"{NEW}fairness-id": "a" * (MAX_TENANT_LENGTH + 1)})
    assert status == 400
    assert "fairness id" in error["message"]


async def test_a_request_needs_its_key_whatever_the_gateway_says(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    status, _ = await ask(backend, {f"{NEW}fairness-id": "alice"}, keys=KEYS)
    assert status == 401
    assert access_lines(caplog)[-1]["key"] is None


async def test_the_headers_of_a_websocket_s_handshake_stand_for_all_of_its_requests(
    backend: FakeBackend,
) -> None:
    headers = {f"{NEW}fairness-id": "tenant-a", f"{NEW}objective": "batch"}
    async with AsgiSocket(make_app(backend, auth=TRUSTED), headers=headers) as socket:
        for _ in range(2):
            await socket.ask(input="a")
    assert [each.claim for each in backend.requests] == 2 * [Claim(5, "gateway:tenant-a")]
