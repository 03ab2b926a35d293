"""`GET /version`: which raystream answers."""

from fastapi import APIRouter
from pydantic import BaseModel

from serve_app.api.openapi import READ_ERRORS, errors


class Version(BaseModel):
    """The server's version."""

    version: str


class VersionApi:
    """Tells the version."""

    def __init__(self, version: str) -> None:
        """Keep the version."""
        self._version = version

    def router(self) -> APIRouter:
        """Return the surface's route."""
        router = APIRouter(tags=["health"])
        router.add_api_route(
            "/version", self.version, summary="Tell the version", responses=errors(*READ_ERRORS)
        )
        return router

    async def version(self) -> Version:
        """Tell the version of the package that is installed."""
        return Version(version=self._version)
