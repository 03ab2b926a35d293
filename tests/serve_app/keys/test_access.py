import pytest
from starlette.requests import Request

from deployments.contract.errors import MissingScopeError
from serve_app.config import ApiKey, Scope
from serve_app.keys.access import OperatorAccess, note_api_key
from serve_app.keys.api_keys import hash_key


def request_of(*scopes: Scope) -> Request:
    """Return a request that a key with these scopes has let in."""
    request = Request({"type": "http", "method": "GET", "state": {}})
    note_api_key(request.scope, ApiKey(name="alice", sha256=hash_key("secret"), scopes=scopes))
    return request


async def test_a_key_with_the_scope_may_operate_from_anywhere() -> None:
    for is_local in (True, False):
        await OperatorAccess(is_local=is_local).require(request_of(Scope.OPERATE))


@pytest.mark.parametrize("is_local", [True, False])
async def test_a_key_without_the_scope_may_not_and_hears_what_to_do(is_local: bool) -> None:
    with pytest.raises(MissingScopeError, match=r"'alice' lacks.*Add `scopes: \[operate\]`") as why:
        await OperatorAccess(is_local=is_local).require(request_of())
    assert (why.value.status, why.value.type) == (403, "permission_error")
    assert why.value.code == "missing_scope"


@pytest.mark.parametrize("scope", [{"type": "http"}, {"type": "http", "state": {}}])
async def test_without_keys_only_a_local_server_lets_requests_operate(
    scope: dict[str, object],
) -> None:
    scope = scope | {"method": "GET"}
    await OperatorAccess(is_local=True).require(Request(scope))
    with pytest.raises(MissingScopeError, match=r"--scope operate.*listen only on 127"):
        await OperatorAccess().require(Request(scope))
