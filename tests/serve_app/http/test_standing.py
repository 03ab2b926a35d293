import pytest

from deployments.contract.claims import Claim
from deployments.contract.errors import InvalidRequestError
from serve_app.config import ApiKey
from serve_app.http.standing import ANYONE, Standing


def key(priority: int = 3, best_priority: int | None = None) -> ApiKey:
    return ApiKey(
        name="alice", sha256="0" * 64, weight=2.5, priority=priority, best_priority=best_priority
    )


def test_without_a_key_any_priority_is_claimed_for_one_tenant() -> None:
    assert ANYONE.claim(None) == Claim()
    assert ANYONE.claim(-1000) == Claim(-1000)


def test_a_key_that_names_no_best_priority_is_bound_by_its_own() -> None:
    standing = Standing.of_key(key())
    assert standing.claim(None) == Claim(3, "alice", 2.5)
    assert standing.claim(4) == Claim(4, "alice", 2.5)
    with pytest.raises(InvalidRequestError, match="'alice' allows the priority 3 and higher"):
        standing.claim(2)


@pytest.mark.parametrize("best", [0, -7])
def test_a_best_priority_of_any_sign_bounds_what_is_named(best: int) -> None:
    standing = Standing.of_key(key(best_priority=best))
    assert standing.claim(best).priority == best
    assert standing.claim(None).priority == 3
    with pytest.raises(InvalidRequestError) as refused:
        standing.claim(best - 1)
    assert refused.value.param == "priority"


def test_a_gateway_s_tenant_has_its_key_s_share_and_bound_and_no_key_s_name() -> None:
    standing = Standing.of_key(key()).of_tenant("bob")
    assert standing.claim(None) == Claim(3, "gateway:bob", 2.5)
    with pytest.raises(InvalidRequestError):
        standing.claim(2)
    assert ANYONE.of_tenant("alice").claim(None).tenant != Standing.of_key(key()).tenant


@pytest.mark.parametrize("priority", [-10, 10])
def test_an_objective_s_priority_stands_for_the_key_s_whichever_is_better(priority: int) -> None:
    standing = Standing.of_key(key()).with_objective("chat", priority)
    assert standing.claim(None) == Claim(priority, "alice", 2.5)
    assert standing.claim(priority + 1).priority == priority + 1
    with pytest.raises(InvalidRequestError, match="objective 'chat' allows the priority"):
        standing.claim(priority - 1)
