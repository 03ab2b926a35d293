"""The routes that a supervisor polls: `GET /live`, `/ready`, `/health` and `/version`."""

from collections.abc import Mapping
from typing import Literal

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel

from deployments.errors import RaystreamError, ReplicaUnavailableError
from serve_app.api.intake.context import ApiContext


class Health(BaseModel):
    """Every engine has answered."""

    status: Literal["ok"] = "ok"
    models: list[str]


class Liveness(BaseModel):
    """The process answers."""

    status: Literal["live"] = "live"


class Readiness(BaseModel):
    """Whether every model that should be awake can be served."""

    status: Literal["ready", "not ready"]


class Version(BaseModel):
    """The version of raystream."""

    version: str


class StatusApi:
    """Reports the state of the models, and the server's version."""

    def __init__(self, context: ApiContext) -> None:
        self._catalog = context.catalog
        self._states = context.states

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(tags=["health"])
        router.add_api_route("/health", self.health, summary="Check the engines")
        router.add_api_route("/live", self.live, summary="Check that the process answers")
        router.add_api_route(
            "/ready",
            self.ready,
            summary="Check whether the models can be served",
            responses={503: {"model": Readiness, "description": "A model has no replica"}},
        )
        router.add_api_route("/version", self.version, summary="Show the version")
        return router

    async def health(self) -> Health:
        """Succeed if the engine of every model that is awake answers."""
        outcomes = await self._catalog.health()
        _require_all(outcomes)
        return Health(models=list(outcomes))

    async def live(self) -> Liveness:
        """Succeed while this process answers, whatever its models do."""
        return Liveness()

    async def ready(self, response: Response) -> Readiness:
        """Succeed if each model has a running replica, or sleeps because nobody uses it.

        Serve's controller is asked, at most once a second; no model computes anything.
        """
        if await self._states.are_ready():
            return Readiness(status="ready")
        response.status_code = 503
        return Readiness(status="not ready")

    async def version(self, request: Request) -> Version:
        """Return the version of the installed package."""
        app: FastAPI = request.app
        return Version(version=app.version)


def _require_all(outcomes: Mapping[str, object]) -> None:
    failed = {id_: error for id_, error in outcomes.items() if isinstance(error, RaystreamError)}
    if failed:
        raise ReplicaUnavailableError("; ".join(f"{id_}: {e}" for id_, e in failed.items()))
