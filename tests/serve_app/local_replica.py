"""Replicas of real models in the tests' own process, without Ray."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from unittest import mock

from ray import serve

from deployments.contract.model_spec import ModelSpec
from deployments.device.device import open_device
from deployments.generator_replica import GeneratorReplica
from deployments.text_generator import TextGenerator
from deployments.text_pooler import TextPooler
from deployments.vllm_generator import VllmGenerator
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.deployments.local_handle import local_backend
from tests.deployments.replica_context import as_replica
from tests.deployments.tiny_folder import spec
from tests.engines import EngineName, keys_of
from tests.serve_app.apps import AppClient

ReplicaT = TypeVar("ReplicaT", bound=GeneratorReplica | TextPooler)

GENERATORS: Final[Mapping[EngineName, type[GeneratorReplica]]] = {
    "raystream": TextGenerator,
    "vllm": VllmGenerator,
}
"""The replica of each engine."""

HANG_S: Final = 120.0
"""Seconds after which an engine of vLLM is taken to hang. In a replica of a test's own process none
does, and the others' tests may leave it too few cores for a step in the product's seconds."""

KEPT: list[type] = []
"""Classes with queues: a queue that is garbage-collected makes an event loop and leaves it open."""


@contextmanager
def local_replica(kind: type[ReplicaT], spec: ModelSpec) -> Iterator[ReplicaT]:
    """Make a replica of a model, and end it after the block."""
    # Serve keeps one queue for each decorated method, on the event loop that used it first. Another
    # replica, or tests on another loop, would wait for it forever.
    queue = serve.batch(cast("Any", kind._encode).__wrapped__)
    made_kind: type[ReplicaT] = type(kind.__name__, (kind,), {"_encode": queue})
    KEPT.append(made_kind)
    with as_replica(spec.id), mock.patch("deployments.vllm_engine.watches.HANG_S", HANG_S):
        # Ray may be running for other tests, but it has assigned no GPU to this process.
        made = made_kind(
            spec, open_device=lambda spec: open_device(spec.entry.device, has_gpu=False)
        )
        try:
            yield made
        finally:
            made.__del__()


@contextmanager
def local_generator(
    folder: Path, engine: EngineName = "raystream", **changes: object
) -> Iterator[GeneratorReplica]:
    """Make a small replica of the model in a folder, named `m`, with changes of its spec."""
    chosen = spec(folder, **{"id": "m", **keys_of(engine), **changes})
    with local_replica(GENERATORS[engine], chosen) as made:
        yield made


@asynccontextmanager
async def local_client(generator: GeneratorReplica, config: AppConfig) -> AsyncIterator[AppClient]:
    """Open a client of the application that this replica serves as `m`."""
    backend = local_backend(generator)
    app = build_app(AppParts(config, {"m": backend}))
    async with aclosing(backend), AppClient(app) as client:
        yield client
