"""The ingress: HTTP in, Server-Sent Events out. It holds no model, and imports none.

`build_app` composes the ASGI application from backends and can be tested without Ray; `Ingress` is
what Ray Serve runs.
"""

import logging
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.middleware import Middleware

from serve_app.api.chat import ChatApi
from serve_app.api.completions import CompletionsApi
from serve_app.api.context import ApiContext
from serve_app.api.errors import install_error_handlers
from serve_app.api.health import HealthApi
from serve_app.api.models import ModelsApi
from serve_app.api.openapi import DescribedApp
from serve_app.api.text_generation import TextGenerationApi
from serve_app.api.tokenize import TokenizeApi
from serve_app.api.version import VersionApi
from serve_app.backends import GenerationBackend, HandleGenerationBackend
from serve_app.catalog import ModelCatalog
from serve_app.clock import Clock, SystemClock
from serve_app.config import AppConfig
from serve_app.docs import install_docs
from serve_app.head_requests import HeadMiddleware
from serve_app.request_guard import RequestGuardMiddleware
from serve_app.request_id import RequestIdMiddleware

logger = logging.getLogger("ray.serve")


def build_app(
    config: AppConfig,
    backends: Mapping[str, GenerationBackend],
    clock: Clock | None = None,
    door_echoes_id: bool = False,
) -> FastAPI:
    """Compose the application.

    Args:
        config: The limits are taken from it.
        backends: One for each model id; the first is the default model.
        clock: The machine's own if None.
        door_echoes_id: See `RequestIdMiddleware`.
    """
    context = ApiContext(ModelCatalog(backends), config.limits, clock or SystemClock())
    app = DescribedApp(
        model_ids=list(backends),
        title="raystream",
        version=_version(),
        docs_url=None,
        redoc_url=None,
        summary="Transformer models behind Server-Sent Events",
        redirect_slashes=False,
        middleware=[
            Middleware(RequestIdMiddleware, door_echoes_id=door_echoes_id),
            Middleware(RequestGuardMiddleware, max_body_bytes=config.limits.max_body_bytes),
            Middleware(HeadMiddleware),
        ],
    )
    install_error_handlers(app)
    for surface in (
        ChatApi,
        CompletionsApi,
        TextGenerationApi,
        TokenizeApi,
        ModelsApi,
        HealthApi,
    ):
        app.include_router(surface(context).router())
    app.include_router(VersionApi(app.version).router())
    install_docs(app)
    return app


@serve.ingress()
class Ingress:
    """Runs the application inside a Serve replica.

    Serve asks for the application when the replica has been made, so nothing of it is pickled. The
    application itself must be the outermost object: Serve adds handlers to it.
    """

    def __init__(self, config: AppConfig, handles: Mapping[str, DeploymentHandle[Any]]) -> None:
        """Keep what the composition root has bound: one handle for each model id."""
        self._config = config
        logger.info("serving %s; POST /v1/chat/completions, GET /docs", ", ".join(handles))
        self._backends = {id_: HandleGenerationBackend(handles[id_]) for id_ in handles}

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application that this replica serves."""
        return build_app(self._config, self._backends, door_echoes_id=True)


def _version() -> str:
    try:
        return version("raystream")
    except PackageNotFoundError:
        return "unknown"
