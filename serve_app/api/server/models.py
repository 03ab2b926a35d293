"""`GET /v1/models` and `GET /v1/models/{id}`: what is served."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from deployments.contract import ClassifierDescription, ModelDescription
from deployments.errors import RaystreamError
from serve_app.api.context import ApiContext
from serve_app.api.openapi import READ_ERRORS, errors
from serve_app.catalog import ServedClassifier, ServedModel


class ModelCard(BaseModel):
    """A model."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="When the model was loaded, in Unix seconds.")
    owned_by: Literal["raystream"] = "raystream"
    task: Literal["generate", "classify"]
    max_model_len: int = Field(
        description="Tokens of prompt and answer together; of one text, if the model classifies."
    )
    accepts_images: bool
    labels: list[str] | None = Field(
        default=None, description="What the model tells apart, if it classifies."
    )


class ModelList(BaseModel):
    """The models that are ready."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ModelsApi:
    """Lists the models."""

    def __init__(self, context: ApiContext) -> None:
        """Keep what every surface is given."""
        self._catalog = context.catalog

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(tags=["models"])
        router.add_api_route(
            "/v1/models",
            self.list_models,
            summary="List the models",
            responses=errors(*READ_ERRORS),
        )
        router.add_api_route(
            "/v1/models/{model_id:path}",
            self.retrieve,
            summary="Show a model",
            responses=errors(*READ_ERRORS, 404, 503),
        )
        return router

    async def list_models(self) -> ModelList:
        """List the models that are ready."""
        outcomes = await self._catalog.ready()
        models = [each for each in outcomes.values() if not isinstance(each, RaystreamError)]
        return ModelList(data=[_card(model) for model in models])

    async def retrieve(self, model_id: str) -> ModelCard:
        """Show one model."""
        model = await self._catalog.probe(model_id)
        return _card(model)


def _card(model: ServedModel | ServedClassifier) -> ModelCard:
    told = model.description
    labels = list(told.labels) if isinstance(told, ClassifierDescription) else None
    return ModelCard(
        id=told.id,
        created=told.created,
        task="generate" if labels is None else "classify",
        max_model_len=told.max_model_len,
        accepts_images=isinstance(told, ModelDescription) and told.accepts_images,
        labels=labels,
    )
