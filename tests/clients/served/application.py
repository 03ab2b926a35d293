"""The server under test: the shipped application with observable replicas, and a window into it.

`serve run` imports this module by the names in the configuration that `conftest` writes.
"""

from typing import Any
from unittest.mock import patch

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve_app import app
from tests.clients.held_generator import HeldGenerator

APPLICATION = "raystream"


def build(args: dict[str, Any]) -> Application:
    """Compose the shipped graph, with replicas that can be observed and held."""
    with patch.object(app, "TextGenerator", HeldGenerator):
        return app.build(args)


class Window:
    """Calls the methods of a model's replica, for clients in any language.

    `GET /wait_until_admitted?model=M&num_requests=N`, for example; see `HeldGenerator`.
    """

    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle[Any]] = {}

    def _handle(self, model: str) -> DeploymentHandle[Any]:
        """Return one handle for all calls, because a new handle first has to find the replicas."""
        if model not in self._handles:
            self._handles[model] = serve.get_deployment_handle(model, APPLICATION)
        return self._handles[model]

    async def __call__(self, request: Request) -> Response:
        """Call the method of the replica that the path names."""
        query = dict(request.query_params)
        handle = self._handle(query.pop("model"))
        method = request.url.path.rpartition("/")[2]
        arguments = {name: int(value) for name, value in query.items()}
        return JSONResponse(await getattr(handle, method).remote(**arguments))


# A second application, besides the shipped one.
window = serve.deployment(
    name="Window", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=100
)(Window).bind()
