"""The routes that a supervisor polls: `GET /live`, `/ready`, `/health` and `/version`."""

from collections.abc import Mapping
from typing import Literal

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel, Field

from deployments.contract.errors import RaystreamError, ReplicaUnavailableError
from serve_app.api.requests.context import ApiContext


class Health(BaseModel):
    """Every engine has answered."""

    status: Literal["ok"] = "ok"
    models: list[str]
    failed_deploy: str | None = Field(
        default=None,
        description="Why the latest deploy has failed, while replicas of an earlier one serve.",
    )


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
        self._devices = context.devices

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(tags=["health"])
        router.add_api_route(
            "/health", self.health, summary="Check the engines", response_model_exclude_none=True
        )
        router.add_api_route("/live", self.live, summary="Check that the process answers")
        router.add_api_route(
            "/ready",
            self.ready,
            summary="Check whether the models can be served",
            responses={503: {"model": Readiness, "description": "No replica of a model answers"}},
        )
        router.add_api_route("/version", self.version, summary="Show the version")
        return router

    async def health(self) -> Health:
        """Succeed if the engine of every model that is awake answers.

        The error names the models that have failed, and why. If a deploy has failed and replicas of
        an earlier one serve, the answer says so.
        """
        outcomes = await self._catalog.health()
        _require_all(outcomes)
        return Health(models=list(outcomes), failed_deploy=await self._devices.failure())

    async def live(self) -> Liveness:
        """Succeed while this process answers, whatever its models do."""
        return Liveness()

    async def ready(self, response: Response) -> Readiness:
        """Succeed if a replica of each model answers, or the model sleeps because nobody uses it.

        Serve's controller and the replicas are asked, at most once a second; no model computes
        anything.
        """
        if all(model.is_ready for model in await self._devices.latest()):
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
