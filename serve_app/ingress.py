"""The ingress: HTTP in, Server-Sent Events out. It holds no model, and imports none.

`build_app` composes the ASGI application from backends and can be tested without Ray; `Ingress` is
what Ray Serve runs.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, Final

from fastapi import FastAPI
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from starlette.middleware import Middleware

from serve_app.access_log import AccessLogMiddleware
from serve_app.api.chat import ChatApi
from serve_app.api.classify import ClassifyApi
from serve_app.api.completions import CompletionsApi
from serve_app.api.context import ApiContext
from serve_app.api.errors import install_error_handlers
from serve_app.api.health import HealthApi
from serve_app.api.models import ModelsApi
from serve_app.api.openapi import DescribedApp
from serve_app.api.text_generation import TextGenerationApi
from serve_app.api.tokenize import TokenizeApi
from serve_app.api.version import VersionApi
from serve_app.api_keys import KeyRing
from serve_app.auth import AuthMiddleware, require_closed_door
from serve_app.backends import GenerationBackend, HandleGenerationBackend
from serve_app.catalog import ModelCatalog
from serve_app.classification_backend import (
    ClassificationBackend,
    HandleClassificationBackend,
    TimelyClassificationBackend,
)
from serve_app.clock import Clock, SystemClock
from serve_app.config import AppConfig
from serve_app.deadlines import DeadlineBackend
from serve_app.docs import install_docs
from serve_app.head_requests import HeadMiddleware
from serve_app.image_fetcher import ImageFetcher, ImageSource
from serve_app.metrics import IngressMetrics
from serve_app.rate_limits import HandleLedger, Ledger, RateLimitMiddleware
from serve_app.request_guard import RequestGuardMiddleware
from serve_app.request_id import RequestIdMiddleware
from serve_app.slow_reader import SlowReaderMiddleware

logger = logging.getLogger("ray.serve")

SURFACES: Final = (
    ChatApi,
    CompletionsApi,
    TextGenerationApi,
    TokenizeApi,
    ClassifyApi,
    ModelsApi,
    HealthApi,
)


def build_app(
    config: AppConfig,
    backends: Mapping[str, GenerationBackend],
    clock: Clock | None = None,
    door_echoes_id: bool = False,
    keys: KeyRing | None = None,
    ledger: Ledger | None = None,
    images: ImageSource | None = None,
    classifiers: Mapping[str, ClassificationBackend] = MappingProxyType({}),
) -> FastAPI:
    """Compose the application.

    Args:
        config: The limits are taken from it.
        backends: One for each model that generates, by its id; the first is their default.
        clock: The machine's own if None.
        door_echoes_id: See `RequestIdMiddleware`.
        keys: Who may come in; anybody if None.
        ledger: Keeps the accounts of keys with limits, if there are any.
        images: Fetches images; over the network if None.
        classifiers: As `backends`, for each model that classifies.
    """
    in_time = {id_: DeadlineBackend(backends[id_], config.limits) for id_ in backends}
    timely = {
        id_: TimelyClassificationBackend(classifiers[id_], config.limits.total_timeout_s)
        for id_ in classifiers
    }
    catalog = ModelCatalog(in_time, timely)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Else whoever asks a model first would wait for its description, too.
        getting_ready = asyncio.create_task(catalog.get_all())
        yield
        getting_ready.cancel()
        await asyncio.wait([getting_ready])

    context = ApiContext(
        catalog,
        config.limits,
        clock or SystemClock(),
        images or ImageFetcher(config.limits),
    )
    app = DescribedApp(
        model_ids=list(backends),
        classifier_ids=list(classifiers),
        title="raystream",
        version=_version(),
        docs_url=None,
        redoc_url=None,
        summary="Transformer models behind Server-Sent Events",
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=list(_middleware(config, door_echoes_id, keys, ledger)),
    )
    app.state.limits = config.limits
    install_error_handlers(app)
    for surface in SURFACES:
        # Not included: FastAPI looks for the routes of an included router twice a request.
        app.router.routes += surface(context).router().routes
    app.router.routes += VersionApi(app.version).router().routes
    install_docs(app)
    return app


def _middleware(
    config: AppConfig, door_echoes_id: bool, keys: KeyRing | None, ledger: Ledger | None
) -> Iterator[Middleware]:
    """Yield what a request passes, the outermost first.

    Every request has a name and leaves a line; nobody holds an answer by not reading it; who has no
    key learns nothing else; what is too large is not charged to anybody.
    """
    yield Middleware(RequestIdMiddleware, door_echoes_id=door_echoes_id)
    yield Middleware(AccessLogMiddleware, writes=config.access_log)
    yield Middleware(SlowReaderMiddleware, timeout_s=config.limits.slow_reader_timeout_s)
    if keys is not None:
        yield Middleware(AuthMiddleware, keys=keys)
    yield Middleware(RequestGuardMiddleware, limits=config.limits)
    if keys is not None and keys.limited:
        assert ledger is not None, "keys with limits need a ledger"
        yield Middleware(RateLimitMiddleware, ledger=ledger)
    yield Middleware(HeadMiddleware)


@serve.ingress()
class Ingress:
    """Runs the application inside a Serve replica.

    Serve asks for the application when the replica has been made, so nothing of it is pickled. The
    application itself must be the outermost object: Serve adds handlers to it.
    """

    def __init__(
        self,
        config: AppConfig,
        handles: Mapping[str, DeploymentHandle[Any]],
        keys: KeyRing | None = None,
        ledger: DeploymentHandle[Any] | None = None,
    ) -> None:
        """Keep what the composition root has bound.

        Args:
            config: The limits are taken from it.
            handles: One for each model id.
            keys: Who may come in; anybody if None.
            ledger: Bound where keys have limits.

        Raises:
            OpenDoorError: Serve listens where others reach it, and nothing keeps them out.
        """
        host = listening_host()
        assert host is not None, "a replica runs under a controller"
        require_closed_door(host, keys is not None, config.auth.allow_anonymous)
        self._config = config
        self._keys = keys
        self._ledger = None if ledger is None else HandleLedger(ledger)
        logger.info("serving %s; POST /v1/chat/completions, GET /docs", ", ".join(handles))
        classifying = {model.id for model in config.models if model.task == "classify"}
        metrics = IngressMetrics()
        self._backends = {
            id_: HandleGenerationBackend(handles[id_], metrics.refusals_of(id_))
            for id_ in handles
            if id_ not in classifying
        }
        self._classifiers = {
            id_: HandleClassificationBackend(handles[id_], metrics.refusals_of(id_))
            for id_ in handles
            if id_ in classifying
        }

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application that this replica serves."""
        return build_app(
            self._config,
            self._backends,
            door_echoes_id=True,
            keys=self._keys,
            ledger=self._ledger,
            classifiers=self._classifiers,
        )


def listening_host() -> str | None:
    """Return where Serve's proxies listen; None while Serve does not run.

    The file's `http_options` reach no application.
    Ray tells it to its own parts alone, hence the private name; a Ray without it fails here, and
    loudly, at the start.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else str(client.http_config.host)


def _version() -> str:
    try:
        return version("raystream")
    except PackageNotFoundError:
        return "unknown"
