"""Serve's own router with our choice, over replicas that only say how busy they are."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from ray import cloudpickle
from ray._common.utils import import_attr
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from deployments.contract.generation import GenerationRequest
from deployments.contract.pooling import PoolingRequest
from deployments.contract.sampling_params import SamplingParams
from serve_app.backends.replicas import model_router
from serve_app.backends.replicas.model_router import ModelRouter
from serve_app.backends.replicas.prefix_memory import prefix_keys
from serve_app.backends.replicas.running_replicas import running_replicas_of
from tests.stopped_clock import settle

TEXT = GenerationRequest("r", "hi", SamplingParams())
ROWS = PoolingRequest("r", ("hi",))
FULL = 512
"""Requests of a replica at which Serve's router looks for another."""


@dataclass(frozen=True)
class Replica:
    """The part of `RunningReplica` that routers use."""

    replica_id: ReplicaID
    node_id: str
    availability_zone: str
    load: int
    fingerprint: str | None = None
    max_ongoing_requests: int = FULL
    multiplexed_model_ids: tuple[str, ...] = ()
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def replica_metadata(self) -> dict[str, object]:
        return {"fingerprint": self.fingerprint}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        await self.may_answer.wait()
        return self.load


Start = Callable[..., ModelRouter]


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Start:
    """Start a router of replicas "a", "b" and so on, of which the first is the least busy.

    Each has a node and a zone of its own, which have its name; the router is in the first one's.
    """
    deployment = DeploymentID("m", request.node.name)

    def started(num_replicas: int, **fingerprints: str) -> ModelRouter:
        router = ModelRouter(  # type: ignore[no-untyped-call] # left untyped
            deployment_id=deployment,
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            self_node_id="a",
            self_availability_zone="a",
            prefer_local_az_routing=True,
        )
        names = "abcdefgh"[:num_replicas]
        replicas = [
            Replica(ReplicaID(name, deployment), name, name, load, fingerprints.get(name))
            for load, name in enumerate(names)
        ]
        router.update_replicas(cast("list[RunningReplica]", replicas))
        for each in replicas:
            each.may_answer.set()
            router.on_new_queue_len_info(each.replica_id, each.load)
        return router

    return started


def pending(request: object) -> PendingRequest:
    # All calls of one HTTP request have the same internal id.
    return PendingRequest([request], {}, RequestMetadata("r", "r"))


async def chosen(router: ModelRouter, request: object) -> str:
    """Return which replica the router takes."""
    async with asyncio.timeout(30):
        replica = await router._choose_replica_for_request(pending(request))
    return replica.replica_id.unique_id


def test_serve_can_copy_the_router_into_its_processes() -> None:
    router = import_attr(model_router.PATH)
    cloudpickle.register_pickle_by_value(model_router)  # type: ignore[no-untyped-call] # left untyped
    try:
        copied = cloudpickle.loads(cloudpickle.dumps(router))  # type: ignore[no-untyped-call] # left untyped
    finally:
        cloudpickle.unregister_pickle_by_value(model_router)  # type: ignore[no-untyped-call] # left untyped
    assert copied.__name__ == "ModelRouter"


@pytest.mark.parametrize("request_", [TEXT, ROWS])
async def test_replicas_that_have_refused_a_request_are_passed_over_though_near_and_less_busy(
    start: Start, request_: GenerationRequest | PoolingRequest
) -> None:
    router = start(3)
    assert await chosen(router, request_) == "a"
    assert await chosen(router, replace(request_, refused_by=frozenset("a"))) == "b"
    assert await chosen(router, replace(request_, refused_by=frozenset("ab"))) == "c"
    assert await chosen(router, replace(request_, refused_by=frozenset("abc"))) == "a"


async def test_a_replica_that_has_refused_is_passed_over_though_it_has_run_the_prompt(
    start: Start,
) -> None:
    router = start(2)
    request = replace(TEXT, prompt="a prompt that is long enough to be remembered " * 99)
    router._running.prefixes.note(prefix_keys(request), "a")
    assert await chosen(router, request) == "a"
    assert await chosen(router, replace(request, refused_by=frozenset("a"))) == "b"


async def test_another_version_is_asked_before_a_replica_that_has_refused(start: Start) -> None:
    router = start(3, a="old", b="old", c="new")
    request = replace(TEXT, fingerprint="old")
    assert await chosen(router, replace(request, refused_by=frozenset("a"))) == "b"
    assert await chosen(router, replace(request, refused_by=frozenset("ab"))) == "c"


async def test_a_node_that_stops_is_left_out_though_it_is_near(start: Start) -> None:
    router = start(2)
    running = running_replicas_of(router._deployment_id.app_name, "m")
    running.set_draining_nodes(frozenset("a"))
    assert await chosen(router, TEXT) == "b"
    running.set_draining_nodes(frozenset("ab"))
    assert await chosen(router, TEXT) == "a"


async def test_a_replica_goes_to_the_request_that_it_was_chosen_for(start: Start) -> None:
    router = start(2)
    b = cast("Replica", router._replicas_list[1])
    b.may_answer.clear()
    router.replica_queue_len_cache.invalidate_key(b.replica_id)
    refused = asyncio.ensure_future(chosen(router, replace(TEXT, refused_by=frozenset("a"))))
    await settle()  # it waits for how busy "b" is
    later = asyncio.ensure_future(chosen(router, TEXT))
    assert await later == "a"
    assert not refused.done()
    b.may_answer.set()
    assert await refused == "b"
    assert router.num_pending_requests == 0
