"""Two replicas of a model behind two ingresses, on the Ray of the tests' own process.

A test can hold back what the replicas answer, and let go of it.
"""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.channel.outbox import OutgoingStream
from deployments.channel.server import ChannelServer
from deployments.contract.generation import StreamKey
from deployments.contract.model_spec import ModelConfig, ModelSpec
from deployments.contract.output import TextDelta
from deployments.replica.model_replica import node_address
from deployments.text_generator import TextGenerator
from serve_app.backends.replicas.model_router import PATH as MODEL_ROUTER
from serve_app.config import ApiKey, AppConfig
from serve_app.ingress_replica import Ingress
from serve_app.keys.api_keys import KeyRing
from serve_app.keys.ledger import KeyLedger
from tests.deployments.tiny_folder import spec
from tests.serve_app.apps import ALICE, BOB, bearer, key

MODEL, NAME = "held", "twins"
DEADLINE_S = 120
NUM_REPLICAS, MAX_NUM_SEQS, NUM_WAITING = 2, 4, 8
"""How many sequences a replica runs at once, and how many requests may wait for it."""
NUM_PLACES = NUM_REPLICAS * (MAX_NUM_SEQS + NUM_WAITING)
MAX_REQUESTS_PER_MINUTE = 5
"""Of Alice's key; Bob's has no limits, and sees metrics."""


class HeldChannels(ChannelServer):
    """Lets the first deltas of each stream pass while it is told to hold the rest."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.num_open = 0
        self._num_passing: int | None = None
        self._held: list[Callable[[], None]] = []

    def hold(self, num_passing: int) -> None:
        self._num_passing = num_passing

    def let_go(self) -> None:
        self._num_passing = None
        held, self._held = self._held, []
        for put in held:
            put()
        self.flush()

    @contextmanager
    def stream(self, key: StreamKey) -> Iterator[OutgoingStream]:
        self.num_open += 1
        try:
            with super().stream(key) as stream:
                put, num_put = stream.put, 0

                def put_or_hold(delta: TextDelta) -> None:
                    nonlocal num_put
                    num_put += 1
                    if self._num_passing is None or num_put <= self._num_passing:
                        put(delta)
                    else:
                        self._held.append(partial(put, delta))

                stream.put = put_or_hold  # type: ignore[method-assign] # only of this stream
                yield stream
        finally:
            self.num_open -= 1


@dataclass(frozen=True)
class Twin:
    """A replica's process, and how many streams it has open."""

    process_id: int
    num_open: int


class HeldGenerator(TextGenerator):
    """Accepts requests, and can hold their answers back."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._channels: HeldChannels = HeldChannels(node_address())

    async def hold(self, num_passing: int) -> None:
        self._channels.hold(num_passing)

    async def let_go(self) -> None:
        self._channels.let_go()

    async def show(self) -> Twin:
        return Twin(os.getpid(), self._channels.num_open)


@dataclass(frozen=True)
class Twins:
    """Both replicas."""

    url: str  # where both ingresses serve them
    handle: DeploymentHandle[Any]  # reaches the replicas themselves

    async def hold(self, num_passing: int = 0) -> None:
        """Hold back all deltas of each stream but so many."""
        await self.handle.broadcast("hold", num_passing).results_async()

    async def let_go(self) -> None:
        """Let go of what is held, and hold nothing; a replica may have been killed."""
        await self.handle.broadcast("let_go").results_async(return_exceptions=True)

    async def busy(self) -> list[int]:
        """Return the processes of replicas that have a stream open."""
        shown: list[Twin] = await self.handle.broadcast("show").results_async()
        return [twin.process_id for twin in shown if twin.num_open]

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Open a client that has Bob's key and a connection for each request."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self.url, headers=bearer(BOB), timeout=DEADLINE_S, limits=limits
        ) as client:
            yield client


def serve_twins(base_url: str, folder: Path) -> Twins:
    """Serve the model of a folder."""
    options = {"num_cpus": 0.1}
    operator = ApiKey.model_validate({**key("bob", BOB).model_dump(), "scopes": ["operate"]})
    keys = KeyRing((key("alice", ALICE, requests_per_minute=MAX_REQUESTS_PER_MINUTE), operator))
    model = serve.deployment(
        name=MODEL,
        ray_actor_options=options,
        max_ongoing_requests=512,
        num_replicas=NUM_REPLICAS,
        request_router_config={"request_router_class": MODEL_ROUTER},
    )(HeldGenerator).bind(
        spec(
            folder,
            id=MODEL,
            max_num_seqs=MAX_NUM_SEQS,
            max_queued_requests=NUM_WAITING,
            max_model_len=4096,
        )
    )
    ledger = serve.deployment(name="KeyLedger", ray_actor_options=options)(KeyLedger)
    ingress = serve.deployment(
        name="Ingress", num_replicas=2, ray_actor_options=options, max_ongoing_requests=1000
    )(Ingress)
    config = AppConfig(models=(ModelConfig(id=MODEL, source=MODEL),))
    bound = ingress.bind(config, {MODEL: model}, keys, ledger.bind(keys.limited))
    serve.run(bound, name=NAME, route_prefix=f"/{NAME}")
    return Twins(f"{base_url}/{NAME}", serve.get_deployment_handle(MODEL, NAME))
