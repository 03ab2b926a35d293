"""The ingress: HTTP in, Server-Sent Events out. It holds no model, and imports none.

`build_app` composes the ASGI application from its parts, and knows no Ray. `ingress_replica` runs
it in Serve.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from deployments.contract.telemetry.tracing import Tracer
from serve_app.api.batches.routes import BatchesApi
from serve_app.api.chat.routes import ChatApi
from serve_app.api.classify.routes import ClassifyApi
from serve_app.api.completions.routes import CompletionsApi
from serve_app.api.docs import DescribedApp, install_docs
from serve_app.api.embeddings.routes import EmbeddingsApi
from serve_app.api.files.routes import FilesApi
from serve_app.api.messages.routes import MessagesApi
from serve_app.api.requests.context import ApiContext
from serve_app.api.rerank.routes import RerankApi
from serve_app.api.responses.background import BackgroundResponses
from serve_app.api.responses.routes import ResponsesApi
from serve_app.api.responses.sockets import IsStopping, Sockets
from serve_app.api.score.routes import ScoreApi
from serve_app.api.server.devices import DevicesApi
from serve_app.api.server.metrics import MetricsApi
from serve_app.api.server.model_actions import ModelActionsApi
from serve_app.api.server.models import ModelsApi
from serve_app.api.server.status import StatusApi
from serve_app.api.text_generation.routes import TextGenerationApi
from serve_app.api.tokenize.routes import TokenizeApi
from serve_app.backends.key_ledger import Ledger
from serve_app.backends.models.devices import Devices, DeviceSources
from serve_app.backends.models.operator_actions import OperatorActions, ScalingControl
from serve_app.backends.models.serving_states import AskStates, ServingStates
from serve_app.backends.models.snapshots import Snapshots
from serve_app.clock import Clock, SystemClock
from serve_app.http.errors import install_error_handlers
from serve_app.http.request_id import RequestIdMiddleware
from serve_app.http.standing import ANYONE, Standing
from serve_app.images.fetcher import ImageFetcher, ImageSource
from serve_app.jobs.batch_runner import BatchRunner
from serve_app.jobs.jobs import Jobs
from serve_app.jobs.response_runner import ResponseRunner
from serve_app.keys.access import OperatorAccess
from serve_app.keys.api_keys import KeyRing
from serve_app.metrics import IngressMetrics
from serve_app.middleware.access_log import AccessLogMiddleware
from serve_app.middleware.auth import AuthMiddleware, is_loopback
from serve_app.middleware.gateway_headers import GatewayHeadersMiddleware
from serve_app.middleware.head_requests import HeadMiddleware
from serve_app.middleware.in_process import InProcessRoutes
from serve_app.middleware.known_hosts import KnownHostsMiddleware
from serve_app.middleware.rate_limits import RateLimitMiddleware
from serve_app.middleware.request_guard import RequestGuardMiddleware
from serve_app.middleware.slow_reader import SlowReaderMiddleware
from serve_app.middleware.sockets import SocketMiddleware
from serve_app.middleware.tracing import TracingMiddleware
from serve_app.playground.page import install_page
from serve_app.served_models import ModelBackends, catalog_of

SURFACES: Final = (
    ChatApi,
    CompletionsApi,
    ResponsesApi,
    MessagesApi,
    TextGenerationApi,
    TokenizeApi,
    ClassifyApi,
    EmbeddingsApi,
    RerankApi,
    ScoreApi,
    FilesApi,
    BatchesApi,
    ModelsApi,
    ModelActionsApi,
    DevicesApi,
    StatusApi,
    MetricsApi,
)


@dataclass(frozen=True, slots=True)
class AppParts(ModelBackends):
    """The parts that the application is composed of.

    Attributes:
        keys: The keys that let requests in; None lets every request in.
        host: The address that the server listens on; None means all of the machine's.
        ledger: Keeps the accounts of keys with limits; required if any key has limits.
        clock: The time, as surfaces see it.
        images: Fetches images; None fetches over the network.
        metrics: Counts what the ingress does.
        snapshots: The metrics of all processes; None shows those of the ingress.
        ask_states: Asks for the states of the deployments; None means that all run.
        devices: Where the figures for operators come from.
        scaling: Serve's scaling, which operators may override; None: nothing scales the models.
        serve_echoes_id: See `RequestIdMiddleware`.
        tracer: Traces POST requests; None traces none.
        on_shutdown: Called once the application has answered its last request.
        watches: Coroutines that run while the application does.
        is_stopping: Asks whether the ingress is about to end; None: nothing waits for connections.
    """

    keys: KeyRing | None = None
    host: str | None = None
    ledger: Ledger | None = None
    clock: Clock = field(default_factory=SystemClock)
    images: ImageSource | None = None
    metrics: IngressMetrics = field(default_factory=IngressMetrics)
    snapshots: Snapshots | None = None
    ask_states: AskStates | None = None
    devices: DeviceSources = field(default_factory=DeviceSources)
    scaling: ScalingControl | None = None
    serve_echoes_id: bool = False
    tracer: Tracer | None = None
    on_shutdown: Sequence[Callable[[], Awaitable[None]]] = ()
    watches: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    is_stopping: IsStopping | None = None


def build_app(parts: AppParts) -> FastAPI:
    """Compose the application."""
    limits = parts.config.limits
    states = ServingStates(parts.ask_states)
    catalog = catalog_of(parts, states)
    jobs = Jobs.of(parts.config.jobs, parts.clock.unix_s)
    sockets = Sockets(limits, parts.config.cors.allowed_origins, stores_responses=jobs is not None)
    images = parts.images or ImageFetcher(limits)
    structured = parts.config.structured_outputs
    context = ApiContext(
        catalog,
        limits,
        parts.clock,
        images,
        structured_outputs=structured,
        devices=Devices(parts.config.models, states, parts.devices),
        operators=OperatorAccess(
            is_local=is_loopback(parts.host), origins=parts.config.cors.allowed_origins
        ),
        actions=OperatorActions(parts.config.models, catalog, states, parts.scaling),
        snapshots=parts.snapshots or Snapshots(parts.metrics.store.snapshot),
        jobs=jobs,
    )
    app = DescribedApp(
        model_ids=list(parts.generators),
        classifier_ids=list(parts.classifiers),
        embedder_ids=list(parts.embedders),
        comparer_ids=lambda: catalog.comparer_ids,
        title="raystream",
        version=_version(),
        docs_url=None,
        redoc_url=None,
        summary="Transformer models behind Server-Sent Events",
        redirect_slashes=False,
        # With any global tracer provider it would emit query strings, with the secrets in them.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        lifespan=_lifespan(context, parts, sockets),
        middleware=list(_middleware(parts, sockets)),
    )
    app.state.limits = limits
    install_error_handlers(app)
    _install_surfaces(app, context)
    return app


def _lifespan(
    context: ApiContext, parts: AppParts, sockets: Sockets
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return a lifespan that asks every model for its description at startup, and runs watches.

    Otherwise the first request to a model would wait for the description too. Batches and responses
    in the background are run as long as the application is.
    """
    jobs = context.jobs

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watches: list[Callable[[], Coroutine[Any, Any, object]]]
        watches = [context.catalog.get_all, *parts.watches]
        if jobs is not None:
            watches += _runners(app, parts, context, jobs)
        if parts.is_stopping is not None:
            watches.append(partial(sockets.watch, parts.is_stopping))
        tasks = [asyncio.create_task(each()) for each in watches]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if jobs is not None:
                await jobs.store.close()
            await asyncio.gather(*(close() for close in parts.on_shutdown))
            if parts.tracer is not None:
                await asyncio.to_thread(parts.tracer.close)

    return lifespan


def _runners(
    app: FastAPI, parts: AppParts, context: ApiContext, jobs: Jobs
) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
    """Yield what runs batches, by the application's own routes, and responses in the background."""
    keys = parts.keys
    standings = {key.name: Standing.of_key(key) for key in (() if keys is None else keys.keys)}
    if keys is None:
        standings[""] = ANYONE
    ask = InProcessRoutes(
        app, writes_log=parts.config.access_log, meter=parts.metrics, tracer=parts.tracer
    )
    parts.metrics.running_batches(0)  # the gauge says that batches are kept, from the start
    yield BatchRunner(jobs, parts.config.limits, ask, standings.get, parts.metrics).run
    answers = BackgroundResponses(context, jobs)
    yield ResponseRunner(jobs, answers, ask.run, standings.get).run


def _install_surfaces(app: FastAPI, context: ApiContext) -> None:
    for surface in SURFACES:
        # Not `include_router`: FastAPI then looks up an included router's routes twice per request.
        app.router.routes += surface(context).router().routes
    install_docs(app)
    install_page(app)


def _middleware(parts: AppParts, sockets: Sockets) -> Iterator[Middleware]:
    """Yield the middleware that a request passes through, outermost first.

    The frames of WebSockets come as requests from the outermost, so all others apply to them.
    Every request gets an id and a line in the access log, and a span if it is traced. Slow readers
    are dropped. A request without a key learns nothing beyond the 401. A request that is too large
    is refused before it is charged to a key.
    """
    limits, keys, ledger = parts.config.limits, parts.keys, parts.ledger
    yield Middleware(SocketMiddleware, sockets=sockets, limits=limits)
    yield Middleware(RequestIdMiddleware, serve_echoes_id=parts.serve_echoes_id)
    if parts.tracer is not None:
        yield Middleware(TracingMiddleware, tracer=parts.tracer)
    yield Middleware(AccessLogMiddleware, writes=parts.config.access_log, meter=parts.metrics)
    yield Middleware(SlowReaderMiddleware, timeout_s=limits.slow_reader_timeout_s)
    auth = parts.config.auth
    if keys is None and is_loopback(parts.host) and not auth.allow_anonymous:
        yield Middleware(KnownHostsMiddleware, allowed=auth.allowed_hosts)
    if origins := parts.config.cors.allowed_origins:
        # Browsers ask for permission without a key.
        yield Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("*",),
        )
    if keys is not None:
        yield Middleware(AuthMiddleware, keys=keys)
    if auth.trusted_gateway:
        yield Middleware(GatewayHeadersMiddleware, objectives=auth.objectives or {})
    jobs = parts.config.jobs
    file_bytes = None if jobs.folder is None else jobs.max_file_bytes
    yield Middleware(RequestGuardMiddleware, limits=limits, max_file_bytes=file_bytes)
    if keys is not None and keys.limited:
        assert ledger is not None, "keys with limits need a ledger"
        yield Middleware(RateLimitMiddleware, ledger=ledger)
    yield Middleware(HeadMiddleware)


def _version() -> str:
    try:
        return version("raystream")
    except PackageNotFoundError:
        return "unknown"
