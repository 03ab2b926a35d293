"""`GET /health`, `GET /ready` and `GET /version`: the routes that a supervisor polls."""

from collections.abc import Mapping
from typing import Literal

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel

from deployments.errors import RaystreamError, ReplicaUnavailableError
from serve_app.api.intake.context import ApiContext


class Health(BaseModel):
    """Every engine has answered."""

    status: Literal["ok"] = "ok"
    models: list[str]


class Readiness(BaseModel):
    """Every model is loaded."""

    status: Literal["ready"] = "ready"
    models: list[str]


class Version(BaseModel):
    """The version of raystream."""

    version: str


class StatusApi:
    """Reports the state of the models, and the server's version."""

    def __init__(self, context: ApiContext) -> None:
        self._catalog = context.catalog

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(tags=["health"])
        router.add_api_route("/health", self.health, summary="Check the engines")
        router.add_api_route(
            "/ready",
            self.ready,
            summary="Check whether the models are loaded",
        )
        router.add_api_route("/version", self.version, summary="Show the version")
        return router

    async def health(self) -> Health:
        """Succeed if the engine of every model answers."""
        outcomes = await self._catalog.health()
        _require_all(outcomes)
        return Health(models=list(outcomes))

    async def ready(self) -> Readiness:
        """Succeed if every model is loaded."""
        outcomes = await self._catalog.ready()
        _require_all(outcomes)
        return Readiness(models=list(outcomes))

    async def version(self, request: Request) -> Version:
        """Return the version of the installed package."""
        app: FastAPI = request.app
        return Version(version=app.version)


def _require_all(outcomes: Mapping[str, object]) -> None:
    failed = {id_: error for id_, error in outcomes.items() if isinstance(error, RaystreamError)}
    if failed:
        raise ReplicaUnavailableError("; ".join(f"{id_}: {e}" for id_, e in failed.items()))
