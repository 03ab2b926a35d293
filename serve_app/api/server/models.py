"""`GET /v1/models` and `GET /v1/models/{id}`: the models that are served."""

import logging
from collections.abc import Iterator, Sequence
from typing import Literal

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, Field, ValidationError

from deployments.contract import ModelDescription, PoolerDescription
from deployments.errors import RaystreamError
from deployments.model_spec import Task
from serve_app.api.intake.context import ApiContext
from serve_app.backends.catalog import ServedModel, ServedPooler

logger = logging.getLogger("ray.serve.raystream.models")
"""Below Serve's logger, which writes it to the replica's file and to the terminal."""


class ModelCard(BaseModel):
    """A model."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="When the model was loaded, in Unix seconds.")
    owned_by: Literal["raystream"] = "raystream"
    root: str = Field(
        description="The hub repository of the model's files, whose tokenizer clients may load. "
        "The id, if the files lie in a folder."
    )
    parent: None = Field(default=None, description="No model is an adapter of another.")
    task: Task
    max_model_len: int = Field(
        description="Most tokens of prompt and answer together; unless the model generates, of one "
        "text."
    )
    accepts_images: bool
    labels: list[str] | None = Field(
        default=None, description="A classifier's labels; null for other models."
    )


class ModelList(BaseModel):
    """The models that are ready."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ModelsApi:
    """Lists the models."""

    def __init__(self, context: ApiContext) -> None:
        self._catalog = context.catalog

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(tags=["models"])
        router.add_api_route(
            "/v1/models",
            self.list_models,
            summary="List the models",
        )
        router.add_api_route(
            "/v1/models/{model_id:path}",
            self.retrieve,
            summary="Show a model",
        )
        return router

    async def list_models(self) -> ModelList:
        """List the models that are ready."""
        outcomes = await self._catalog.ready()
        models = [each for each in outcomes.values() if not isinstance(each, RaystreamError)]
        return ModelList(data=list(_cards(models)))

    async def retrieve(self, model_id: str) -> ModelCard:
        """Show one model."""
        if not model_id.strip("/"):
            raise HTTPException(404)  # /v1/models/ is a slip for /v1/models
        return _card(await self._catalog.probe(model_id))


def _cards(models: Sequence[ServedModel | ServedPooler]) -> Iterator[ModelCard]:
    """Yield each model's card; one that can't be made leaves the others in the list."""
    for model in models:
        try:
            yield _card(model)
        except ValidationError as error:
            logger.error("%s is left out of /v1/models: %r", model.description.id, error.errors())


def _card(model: ServedModel | ServedPooler) -> ModelCard:
    found = model.description
    labels = list(found.labels) if isinstance(found, PoolerDescription) and found.labels else None
    return ModelCard(
        id=found.id,
        created=found.created,
        root=found.root or found.id,
        task=_task(found),
        max_model_len=found.max_model_len,
        accepts_images=isinstance(found, ModelDescription) and found.accepts_images,
        labels=labels,
    )


def _task(found: ModelDescription | PoolerDescription) -> Task:
    if isinstance(found, ModelDescription):
        return "generate"
    return "classify" if found.embedding is None else "embed"
