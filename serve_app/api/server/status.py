"""`GET /health`: the engines answer. `GET /ready`: the models are loaded."""

from collections.abc import Mapping
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from deployments.errors import RaystreamError, ReplicaUnavailableError
from serve_app.api.context import ApiContext
from serve_app.api.openapi import errors


class Health(BaseModel):
    """All is well."""

    status: Literal["ok"] = "ok"
    models: list[str]


class Readiness(BaseModel):
    """All models are loaded."""

    status: Literal["ready"] = "ready"
    models: list[str]


class HealthApi:
    """Tells a supervisor how the models are."""

    def __init__(self, context: ApiContext) -> None:
        """Keep what every surface is given."""
        self._catalog = context.catalog

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(tags=["health"])
        router.add_api_route(
            "/health", self.health, summary="Exercise the engines", responses=errors(400, 500, 503)
        )
        router.add_api_route(
            "/ready",
            self.ready,
            summary="Ask whether the models are loaded",
            responses=errors(400, 500, 503),
        )
        return router

    async def health(self) -> Health:
        """Exercise the engine of every model."""
        outcomes = await self._catalog.health()
        _require_all(outcomes)
        return Health(models=list(outcomes))

    async def ready(self) -> Readiness:
        """Succeed once every model is loaded."""
        outcomes = await self._catalog.ready()
        _require_all(outcomes)
        return Readiness(models=list(outcomes))


def _require_all(outcomes: Mapping[str, object]) -> None:
    failed = {id_: error for id_, error in outcomes.items() if isinstance(error, RaystreamError)}
    if failed:
        told = "; ".join(f"{id_}: {error}" for id_, error in failed.items())
        raise ReplicaUnavailableError(told)
