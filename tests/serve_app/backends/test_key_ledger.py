from typing import TYPE_CHECKING, Any, cast

import pytest
from ray.exceptions import ActorDiedError

from deployments.contract.errors import ReplicaUnavailableError
from serve_app.backends.key_ledger import HandleLedger
from serve_app.keys.ledger import Verdict
from tests.serve_app.backends.replicas.test_handles import FakeMethod, FakeResponse

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


class FakeHandle:
    """The part of `DeploymentHandle` that the ledger uses; each call gets this answer."""

    def __init__(self, answer: object) -> None:
        self.admit = self.settle = FakeMethod(FakeResponse(answer))


def ledger(answer: object) -> HandleLedger:
    return HandleLedger(cast("DeploymentHandle[Any]", FakeHandle(answer)))


async def test_the_ledger_s_verdict_is_passed_on() -> None:
    verdict = Verdict("streams", 1, None, None)
    assert await ledger(verdict).admit("a", "1") is verdict


async def test_a_dead_ledger_is_unavailable() -> None:
    with pytest.raises(ReplicaUnavailableError):
        await ledger(ActorDiedError()).admit("a", "1")
    with pytest.raises(ReplicaUnavailableError):
        await ledger(ActorDiedError()).settle("a", "1", 0)
