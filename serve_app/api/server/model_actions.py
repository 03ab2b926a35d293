"""`POST /v1/models/{id}/wake`, `/sleep`, `/pin` and `/unpin`: what operators do to models.

They act for all users, so they are for operators (`serve_app.keys.access`).
"""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, Field

from serve_app.api.requests.context import ApiContext
from serve_app.backends.models.serving_states import DeploymentState, ServingState

ACCEPTED = 202


class ModelState(BaseModel):
    """The state of a model, as an operator's action has left it."""

    id: str
    object: Literal["model.state"] = "model.state"
    state: ServingState
    pinned: bool = Field(description="Whether an operator keeps a replica running.")
    going_to_sleep: bool = Field(
        description="Whether the replicas end as soon as they have nothing to do, because an "
        "operator wants it."
    )

    @classmethod
    def of(cls, model_id: str, state: DeploymentState) -> "ModelState":
        """Return the description of a state."""
        return cls(
            id=model_id,
            state=state.serving,
            pinned=state.is_pinned,
            going_to_sleep=state.is_going_to_sleep,
        )


class ModelActionsApi:
    """Lets operators wake models, put them to sleep and pin them."""

    def __init__(self, context: ApiContext) -> None:
        self._actions = context.actions
        self._operators = context.operators

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(tags=["models"], dependencies=[Depends(self._operators.require)])
        for name, endpoint, summary in (
            ("wake", self.wake, "Start a model that sleeps"),
            ("sleep", self.sleep, "Let a model sleep as soon as it has nothing to do"),
            ("pin", self.pin, "Keep a model running"),
            ("unpin", self.unpin, "Let a model sleep, and take turns, again"),
        ):
            router.add_api_route(
                f"/v1/models/{{model_id:path}}/{name}",
                endpoint,
                methods=["POST"],
                summary=summary,
                response_model=ModelState,
            )
        return router

    async def wake(
        self,
        model_id: str,
        response: Response,
        wait: Annotated[
            bool, Query(description="Answer only once a replica runs, or can't be started.")
        ] = False,
    ) -> ModelState:
        """Start a replica of a model that sleeps; a 202 says that it is on its way.

        If the model sleeps lightly, one of its replicas wakes. A sleep that has not begun is taken
        back, too. The model sleeps again if nobody uses it.
        """
        return _told(model_id, await self._actions.wake(model_id, waits=wait), response)

    async def sleep(self, model_id: str, response: Response) -> ModelState:
        """End a model's replicas once no request runs or waits; a 202 says that they still run.

        Requests that come before are answered, and put it off. The next request after it wakes the
        model.
        """
        state = await self._actions.sleep(model_id)
        if state.is_going_to_sleep:
            response.status_code = ACCEPTED
        return ModelState.of(model_id, state)

    async def pin(self, model_id: str, response: Response) -> ModelState:
        """Keep a replica running and awake, whether or not the model is used, until it is unpinned.

        A model that takes turns gets its turn in order, and keeps it. A 202 says that no replica
        runs yet.
        """
        return _told(model_id, await self._actions.pin(model_id), response)

    async def unpin(self, model_id: str) -> ModelState:
        """Let only the load decide again; it is no error if the model is not pinned."""
        return ModelState.of(model_id, await self._actions.unpin(model_id))


def _told(model_id: str, state: DeploymentState, response: Response) -> ModelState:
    """Return the answer; its status says whether a replica runs already."""
    if state.serving is not ServingState.RUNNING:
        response.status_code = ACCEPTED
    return ModelState.of(model_id, state)
