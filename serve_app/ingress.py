"""The ingress: HTTP in, Server-Sent Events out. It holds no model, and imports none.

`build_app` composes the ASGI application from its parts and can be tested without Ray. `Ingress` is
the class that Ray Serve runs.
"""

import asyncio
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, Protocol

from fastapi import FastAPI
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from deployments.contract.gen_ai_spans import ModelSpans
from deployments.contract.model_spec import ModelSpec
from deployments.contract.telemetry.tracing import SpanKind, Tracer, open_tracer
from deployments.replica.ray_metrics import RayMetrics
from deployments.replica.start_board import read_starts
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
from serve_app.backends.key_ledger import HandleLedger, Ledger
from serve_app.backends.models.cluster_state import serve_replicas
from serve_app.backends.models.devices import Devices, DeviceSources
from serve_app.backends.models.operator_actions import OperatorActions, ScalingControl
from serve_app.backends.models.serve_scaling import ServeScaling
from serve_app.backends.models.serving_states import AskStates, ServingStates
from serve_app.backends.models.snapshots import (
    PATIENCE_S,
    IngressReport,
    ModelSource,
    Snapshots,
)
from serve_app.backends.replicas.handles import Handle, ask_all
from serve_app.backends.replicas.replica_departures import STOPPING
from serve_app.backends.replicas.replica_reports import HandleReports
from serve_app.clock import Clock, SystemClock
from serve_app.config import AppConfig
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
from serve_app.middleware.auth import AuthMiddleware, is_loopback, require_protection
from serve_app.middleware.gateway_headers import GatewayHeadersMiddleware
from serve_app.middleware.head_requests import HeadMiddleware
from serve_app.middleware.in_process import InProcessRoutes
from serve_app.middleware.rate_limits import RateLimitMiddleware
from serve_app.middleware.request_guard import RequestGuardMiddleware
from serve_app.middleware.slow_reader import SlowReaderMiddleware
from serve_app.middleware.sockets import SocketMiddleware
from serve_app.middleware.tracing import TracingMiddleware
from serve_app.playground.page import install_page
from serve_app.served_models import ApplicationDescription, HandleModels, ModelBackends, catalog_of

logger = logging.getLogger("ray.serve")
own_logger = logging.getLogger("ray.serve.raystream.ingress")

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
        yield
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
    if parts.config.auth.trusted_gateway:
        yield Middleware(GatewayHeadersMiddleware, objectives=parts.config.auth.objectives or {})
    jobs = parts.config.jobs
    file_bytes = None if jobs.folder is None else jobs.max_file_bytes
    yield Middleware(RequestGuardMiddleware, limits=limits, max_file_bytes=file_bytes)
    if keys is not None and keys.limited:
        assert ledger is not None, "keys with limits need a ledger"
        yield Middleware(RateLimitMiddleware, ledger=ledger)
    yield Middleware(HeadMiddleware)


class Announcement(Protocol):
    """What tells users that the server is ready."""

    def is_ready(self) -> bool:
        """Ask the server whether it is; this may take seconds."""
        ...

    def text(self, after_s: float) -> str:
        """Return the lines; `after_s` is how long the start took, in seconds."""
        ...


async def announce(announcement: Announcement, poll_s: float = 1.0) -> None:
    """Log an announcement once the server is ready.

    If it is at once, another ingress serves already, and has told so.
    """
    began_s = time.monotonic()
    is_ready = await asyncio.to_thread(announcement.is_ready)
    if is_ready:
        return
    while not is_ready:
        await asyncio.sleep(poll_s)
        is_ready = await asyncio.to_thread(announcement.is_ready)
    own_logger.info(announcement.text(time.monotonic() - began_s))


@serve.ingress()
class Ingress:
    """Runs the application inside a Serve replica.

    Serve asks for the application after it has made the replica, so the application is never
    pickled. The application must be the outermost object: Serve adds handlers to it.
    """

    def __init__(
        self,
        config: AppConfig,
        handles: Mapping[str, Handle],
        keys: KeyRing | None = None,
        ledger: Handle | None = None,
        specs: Sequence[ModelSpec] = (),
        announcement: Announcement | None = None,
    ) -> None:
        """Wrap the handles that the composition root has bound.

        Args:
            config: The whole configuration.
            handles: One for each model id.
            keys: The keys that let requests in; None lets every request in.
            ledger: Bound if keys have limits.
            specs: What the replicas know of models that may sleep. Their deployments have our
                router, which tells whether a replica runs.
            announcement: What to log once the server is ready; None if another says so.

        Raises:
            UnprotectedServerError: Others can reach the server, and it has no keys.
        """
        host = listening_host()
        assert host is not None, "a replica runs under a controller"
        require_protection(host, keys is not None, config.auth.allow_anonymous)
        logger.info("serving %s; GET /, GET /docs, POST /v1/chat/completions", ", ".join(handles))
        self._config = config
        self._specs = specs
        context = serve.get_replica_context()
        metrics = IngressMetrics(handles, context.deployment, context.replica_id.unique_id)
        self._ray_metrics = RayMetrics(metrics.store)
        tracer = open_tracer(
            config.tracing.settings, "raystream-ingress", context.replica_id.unique_id
        )

        def spans_of(id_: str) -> ModelSpans | None:
            return None if tracer is None else ModelSpans(tracer, id_, SpanKind.CLIENT)

        models = HandleModels.of(config, handles, specs, context.app_name, spans_of)
        self._snapshots = Snapshots(
            metrics.store.snapshot,
            {
                id_: ModelSource(
                    partial(ask_all, handle, "read_metrics", PATIENCE_S),
                    models.replicas.get(id_),
                )
                for id_, handle in handles.items()
            },
            partial(ask_all, _own_handle(context), "read_metrics", PATIENCE_S),
        )
        self._parts = AppParts(
            config=config,
            generators=models.generators,
            classifiers=models.classifiers,
            embedders=models.embedders,
            replicas=models.replicas,
            departures=models.departures,
            shares=models.shares,
            describe_files=models.describe_files,
            keys=keys,
            host=host,
            ledger=None if ledger is None else HandleLedger(ledger),
            metrics=metrics,
            snapshots=self._snapshots,
            ask_states=models.ask_states,
            devices=DeviceSources(
                {
                    id_: HandleReports(handle, models.running[id_]).ask
                    for id_, handle in handles.items()
                },
                read_starts=partial(asyncio.to_thread, read_starts, context.app_name),
            ),
            scaling=ServeScaling(
                context.app_name,
                {handle.deployment_name: models.running[id_] for id_, handle in handles.items()},
            ),
            serve_echoes_id=True,
            tracer=tracer,
            is_stopping=partial(_is_stopping, context),
            on_shutdown=[models.aclose, partial(asyncio.to_thread, self._ray_metrics.close)],
            watches=[
                *models.watches,
                *([] if announcement is None else [partial(announce, announcement)]),
            ],
        )

    async def describe_application(self) -> ApplicationDescription:
        """Return what another process needs to reach the models as this one does."""
        return ApplicationDescription(self._config, tuple(self._specs))

    async def read_metrics(self) -> IngressReport:
        """Return this ingress's metrics, and what it remembers of replicas that are gone."""
        return self._snapshots.report()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application that this replica serves."""
        return build_app(self._parts)


def _own_handle(context: serve.context.ReplicaContext) -> Handle:
    """Return a handle to all replicas of the ingress."""
    return serve.get_deployment_handle(context.deployment, context.app_name)


async def _is_stopping(context: serve.context.ReplicaContext) -> bool:
    """Return whether Serve stops this replica of the ingress. It tells a replica nothing of that.

    Raises:
        Exception: The controller does not answer.
    """
    states = (await serve_replicas(context.app_name, context.deployment)).states
    # A controller that has been restarted knows no replica at first.
    return bool(states) and states.get(context.replica_id.unique_id, STOPPING) == STOPPING


def listening_host() -> str | None:
    """Return the host that Serve's proxies listen on; None while Serve does not run.

    An application can't see the `http_options` of its own configuration file. Only a private
    function of Ray returns them; a Ray version without it fails at import, so we would notice.
    """
    options = listening_options()
    return None if options is None else str(options.host)


def listening_options() -> HTTPOptions | None:
    """Return Serve's options for HTTP; None while Serve does not run. See `listening_host`."""
    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config


def _version() -> str:
    try:
        return version("raystream")
    except PackageNotFoundError:
        return "unknown"
