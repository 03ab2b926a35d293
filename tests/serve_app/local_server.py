"""The whole application over replicas of real models, in the tests' own process.

The event loop of the application and of its replicas runs in a thread, so that a test may block.
"""

import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Never, cast

import httpx
import httpx2
import uvicorn
from anyio.from_thread import BlockingPortal, start_blocking_portal
from fastapi import FastAPI

from deployments.contract.model_spec import ModelConfig
from deployments.generator_replica import GeneratorReplica
from deployments.replica.model_replica import ModelReplica
from deployments.text_generator import TextGenerator
from deployments.text_pooler import TextPooler
from raystream.local_handle import LocalHandle
from serve_app.backends.models.devices import DeviceSources
from serve_app.backends.models.snapshots import ModelSource, Snapshots
from serve_app.backends.replicas.handle_backend import HandleBackend
from serve_app.backends.replicas.replica_reports import Reports
from serve_app.config import AppConfig
from serve_app.gpu_shares import resolve_models
from serve_app.ingress import AppParts, build_app
from serve_app.metrics import IngressMetrics
from tests.serve_app.app_transport import AppTransport, AsyncAppTransport, WholeAnswers
from tests.serve_app.local_replica import local_replica

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

LOCALHOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LocalServer:
    """An application that runs."""

    config: AppConfig  # what it serves
    app: FastAPI  # the application
    portal: BlockingPortal  # calls functions on the application's event loop
    replicas: Mapping[str, ModelReplica]  # the replica of each model, by its id
    url: str = "http://local"  # the address that clients give for it. Nothing listens there.

    def client(self, **options: Any) -> httpx2.Client:
        """Return a client whose requests reach the application."""
        transport = AppTransport(self.app, self.portal)
        return httpx2.Client(transport=transport, base_url=self.url, timeout=60, **options)

    def async_client(self) -> httpx2.AsyncClient:
        """Return the same for coroutines."""
        transport = AsyncAppTransport(self.app, self.portal)
        return httpx2.AsyncClient(transport=transport, base_url=self.url, timeout=60)

    def old_client(self) -> httpx.Client:
        """Return a client for libraries that still use httpx; it reads whole answers."""
        transport = WholeAnswers(self.app, self.portal)
        return httpx.Client(transport=transport, base_url=self.url, timeout=60)

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Let other processes reach the application, at the yielded address."""
        server = uvicorn.Server(uvicorn.Config(self.app, lifespan="off", log_config=None))
        with socket.create_server((LOCALHOST, 0)) as listener:
            serving = self.portal.start_task_soon(server.serve, [listener])
            try:
                yield f"http://{LOCALHOST}:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                serving.result()


@contextmanager
def local_server(
    config: AppConfig, generator: type[GeneratorReplica] = TextGenerator
) -> Iterator[LocalServer]:
    """Load the models on processors and run the application; replicas are of class `generator`."""
    specs = resolve_models(config.models, 0, _read_no_shape)
    with ExitStack() as stack:
        replicas: dict[str, ModelReplica] = {}
        for model in config.models:
            spec = specs[model.id]
            replica: GeneratorReplica | TextPooler
            if model.task == "generate":
                replica = stack.enter_context(local_replica(generator, spec))
            else:
                replica = stack.enter_context(local_replica(TextPooler, spec))
            replica.reconfigure({})  # as Serve does, to set how requests are batched
            replicas[model.id] = replica
        portal = stack.enter_context(start_blocking_portal())
        app = stack.enter_context(portal.wrap_async_context_manager(_running(config, replicas)))
        yield LocalServer(config, app, portal, replicas)


@asynccontextmanager
async def _running(
    config: AppConfig, replicas: Mapping[str, ModelReplica]
) -> AsyncIterator[FastAPI]:
    """Compose the application, as `Ingress` does, and run it."""
    tasks = {model.id: model.task for model in config.models}
    handles = {
        id_: cast("DeploymentHandle[Any]", LocalHandle(each)) for id_, each in replicas.items()
    }
    generators = {
        id_: HandleBackend(handle) for id_, handle in handles.items() if tasks[id_] == "generate"
    }
    poolers = {
        id_: HandleBackend(handle) for id_, handle in handles.items() if id_ not in generators
    }
    metrics = IngressMetrics(handles, "Ingress", "local")
    app = build_app(
        AppParts(
            config,
            generators,
            {id_: each for id_, each in poolers.items() if tasks[id_] == "classify"},
            {id_: each for id_, each in poolers.items() if tasks[id_] == "embed"},
            host=LOCALHOST,
            metrics=metrics,
            snapshots=Snapshots(
                metrics.store.snapshot,
                {
                    id_: ModelSource(partial(_read_metrics, each), None)
                    for id_, each in replicas.items()
                },
            ),
            devices=DeviceSources({id_: partial(_report, each) for id_, each in replicas.items()}),
        )
    )
    async with AsyncExitStack() as stack:
        for backend in generators.values():
            await stack.enter_async_context(aclosing(backend))
        for pooler in poolers.values():
            await stack.enter_async_context(aclosing(pooler))
        await stack.enter_async_context(app.router.lifespan_context(app))
        yield app


async def _read_metrics(replica: ModelReplica) -> tuple[object, ...]:
    return (await replica.read_metrics(),)


async def _report(replica: ModelReplica, is_any_running: bool) -> Reports:
    return Reports((await replica.inspect(),), num_started=1)


def _read_no_shape(model: ModelConfig) -> Never:
    raise AssertionError(f"{model.id} needs no share of a GPU")
